//! A secret that requests are given outside is nowhere that a guest, or whoever reads what is told of one, could find it.

use std::{
    fs::{self, File},
    io::{Read as _, Seek as _, SeekFrom},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use harness::{HANG, Setup, World, process::Process, refused, within};
use memchr::memmem::Finder;
use sandbox_sdk::{Client, Reason, admin::EgressWatch, v1::egress_watch_reply::Event};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::node::{Node, seeded, sh};

/// Bytes that are looked at together.
const CHUNK: usize = 1 << 16;

/// Words that are sought, in the forms in which they may be written.
#[derive(Clone)]
struct Words(Vec<Finder<'static>>);

impl Words {
    fn of(word: &str) -> Self {
        let forms = [word.as_bytes().to_vec(), STANDARD.encode(word).into_bytes()];
        Self(forms.iter().map(|form| Finder::new(form).into_owned()).collect())
    }

    fn are_in(&self, bytes: &[u8]) -> bool {
        self.0.iter().any(|word| word.find(bytes).is_some())
    }

    /// Whether they are in what a reader gives, cut wherever.
    fn are_in_all_of(&self, mut from: impl FnMut(&mut [u8]) -> usize) -> bool {
        let zeros = vec![0; CHUNK];
        let mut buffer = vec![0; CHUNK];
        let mut kept = 0;
        loop {
            let n = from(&mut buffer[kept..]);
            if n == 0 {
                return false;
            }
            // Most of a machine's memory was never written.
            if buffer[..kept + n] == zeros[..kept + n] {
                kept = 0;
                continue;
            }
            if self.are_in(&buffer[..kept + n]) {
                return true;
            }
            // A word may go on in what comes next.
            let tail = (kept + n).min(256);
            buffer.copy_within(kept + n - tail..kept + n, 0);
            kept = tail;
        }
    }

    /// The files below a folder that have them.
    fn files(&self, folder: &Path) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for entry in fs::read_dir(folder).unwrap() {
            // The daemon goes on at its work: what is gone by now told nobody anything.
            let Ok(entry) = entry else { continue };
            let (path, kind) = (entry.path(), entry.file_type());
            match kind {
                Ok(kind) if kind.is_dir() => found.extend(self.files(&path)),
                Ok(kind) if kind.is_file() => {
                    let Ok(mut file) = File::open(&path) else { continue };
                    if self.are_in_all_of(|buffer| file.read(buffer).unwrap_or(0)) {
                        found.push(path);
                    }
                }
                Ok(_) | Err(_) => {}
            }
        }
        found
    }

    /// Whether they are in the memory of a process: of a virtual machine its own, and all of its guest.
    fn are_in_memory_of(&self, process: Process) -> bool {
        let maps = fs::read_to_string(format!("/proc/{}/maps", process.pid)).unwrap();
        let mut memory = File::open(format!("/proc/{}/mem", process.pid)).unwrap();
        let mut regions = 0;
        let found = maps.lines().any(|line| {
            let mut words = line.split(' ');
            let (range, mode) = (words.next().unwrap(), words.next().unwrap());
            if !mode.starts_with('r') || line.ends_with("[vvar]") || line.ends_with("[vsyscall]") {
                return false;
            }
            let (from, to) = range.split_once('-').unwrap();
            let at = |text| u64::from_str_radix(text, 16).unwrap();
            let (mut at, to) = (at(from), at(to));
            regions += 1;
            self.are_in_all_of(|buffer| {
                let most = usize::try_from(to - at).unwrap().min(buffer.len());
                memory.seek(SeekFrom::Start(at)).unwrap();
                // What lies beyond the end of its file cannot be read.
                let n = memory.read(&mut buffer[..most]).unwrap_or(0);
                at += n as u64;
                n
            })
        });
        assert!(found || regions > 10, "{maps}");
        found
    }
}

/// Looks at much, and lets connections be kept alive meanwhile.
async fn aside<T: Send + 'static>(look: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(look).await.unwrap()
}

async fn in_memory(words: &Words, process: Process) -> bool {
    let words = words.clone();
    aside(move || words.are_in_memory_of(process)).await
}

/// A word that nobody else has.
fn word(kind: &str) -> String {
    format!("{kind}-{:032x}", u128::from_ne_bytes(sandboxd::random::bytes()))
}

/// Configuration: what goes to `/a` of the origin is given the secret of this file.
fn config(world: &World, file: &Path) -> String {
    let rules = format!(
        "[{{ id = \"t\", host = [\"allowed.test\"], ports = [{}], paths = [\"/a\"], secret = \"s\", cleartext_secret = true }}]",
        world.port()
    );
    format!(
        "pool.default.warm = 1\n{}[egress.secret.s]\nheader = \"authorization\"\nprefix = \"Bearer \"\n\
         value = {{ file = {file:?} }}\nhosts = [\"allowed.test\"]\n",
        world.config_with(&rules)
    )
}

/// A search of the guest's disks, environments and command lines for a word that is in none of its own.
fn search_for(word: &str) -> String {
    let (first, rest) = word.split_at(20);
    format!(
        "word=$(echo '{first}|{rest}' | tr -d '|'); look() {{ printf '%s\\n' \"$word\" | grep -sF -f /dev/stdin \"$@\"; }}; \
         look -rl /bin /etc /home /root /run /tmp /usr /var /dev/shm; \
         look -l /proc/[0-9]*/environ /proc/[0-9]*/cmdline; true"
    )
}

/// What is told of reloads which the secret fails: by its file's mode, and by its text.
async fn refused_reloads(client: &Client, file: &Path, secret: &str) -> String {
    let mode = |mode| fs::set_permissions(file, fs::Permissions::from_mode(mode)).unwrap();
    mode(0o644);
    let first = refused(client.node().reload().await, Reason::ReloadRefused);
    mode(0o600);
    fs::write(file, format!("{secret}\n{secret}")).unwrap();
    let second = refused(client.node().reload().await, Reason::ReloadRefused);
    format!("{first} {first:?} {second} {second:?}")
}

/// The next decision, as a program prints it.
async fn decision(tail: &mut EgressWatch) -> String {
    let reply = within(HANG, tail.next()).await.unwrap().unwrap();
    assert!(matches!(reply.event, Some(Event::Decision(_))), "{reply:?}");
    format!("{reply:?}")
}

#[tokio::test]
async fn secret_never_in_guest_or_logs() {
    let (secret, known) = (word("hush"), word("known"));
    let heads = Arc::new(Mutex::new(String::new()));
    let keep = Arc::clone(&heads);
    let world = World::with_origin(move |stream| keeps(stream, Arc::clone(&keep))).await;
    let port = world.port();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    fs::write(&file, format!("{secret}\n")).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let setup = Setup::qemu()
        .from_file()
        .log("trace")
        .config(&config(&world, &file));
    let node = Box::pin(Node::on(seeded().await, setup)).await;
    node.until_warm(1).await;
    let client = node.client().await;
    let mut tail = client.egress().watch("", None).await.unwrap();
    let sandbox = node.claim().await;

    // The origin is shown it, in place of what the guest sent; what is refused is not.
    let url = format!("http://allowed.test:{port}/a");
    let fetched = sh(
        &sandbox,
        &format!("wget -q -O - --header 'Authorization: {known}' {url}"),
    )
    .await;
    assert_eq!(fetched, "yes");
    assert!(
        heads
            .lock()
            .unwrap()
            .contains(&format!("authorization: Bearer {secret}\r\n"))
    );
    let other = format!("http://allowed.test:{port}/b");
    let refusal = sh(
        &sandbox,
        &format!("wget -O - {other} 2>&1; wget -q -O - http://door.internal/denials || true"),
    )
    .await;
    assert!(refusal.contains("path_not_allowed"), "{refusal}");
    let mut told = format!("{fetched}{refusal}");
    for _ in 0..2 {
        told.push_str(&decision(&mut tail).await);
    }
    assert!(told.contains("secret: \"s\""), "the record names it: {told}");
    for url in [&url, &other] {
        let question = ["egress", "explain", "--sandbox", sandbox.id(), url, "--resolve"];
        told.push_str(&node.ctl().json(question).await.to_string());
    }
    told.push_str(
        &node
            .ctl()
            .json(["egress", "show", sandbox.id()])
            .await
            .to_string(),
    );
    told.push_str(&refused_reloads(&client, &file, &secret).await);

    // It is in no answer, and in no file of the daemon: log, journal, store, run directory, templates.
    let words = Words::of(&secret);
    assert!(!words.are_in(told.as_bytes()), "{told}");
    assert!(!words.are_in(node.log().as_bytes()));
    assert!(node.log().contains("TRACE"), "all of it was logged");
    let (everywhere, dir) = (words.clone(), node.dir());
    assert_eq!(aside(move || everywhere.files(&dir)).await, [] as [PathBuf; 0]);
    // It is on no disk, in no environment and no process of the guest, and nowhere in its memory.
    let machine = node.process_of(sandbox.id()).await;
    assert!(!in_memory(&words, machine).await, "the guest's memory");
    assert_eq!(sh(&sandbox, &search_for(&secret)).await, "");
    // Where what the guest knows is found, and the daemon's own memory is where the secret is.
    assert!(in_memory(&Words::of(&known), machine).await);
    sh(&sandbox, &format!("echo {known} > /root/planted")).await;
    assert_eq!(sh(&sandbox, &search_for(&known)).await, "/root/planted\n");
    assert!(in_memory(&words, node.process()).await);
    sandbox.release().await.unwrap();
}

/// Answers each connection's one request, and keeps its head.
async fn keeps(mut stream: TcpStream, heads: Arc<Mutex<String>>) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    heads.lock().unwrap().push_str(&String::from_utf8(head).unwrap());
    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\n\r\nyes";
    drop(stream.write_all(answer).await);
}
