//! A guest's git through its door.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Stdio,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use harness::{HANG, Setup, World, refused, within};
use sandbox_sdk::{How, Reason, SandboxHandle};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    process::Command,
};

use crate::node::{Node, sh};

/// A repository, served as git's own HTTP server would, to whoever shows the credential.
#[derive(Debug, Clone)]
struct Served {
    repository: PathBuf,
    authorization: String,
}

impl Served {
    /// Answers one request and ends the connection.
    async fn answer(self, stream: TcpStream) {
        let mut stream = BufReader::new(stream);
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            match stream.read_line(&mut line).await {
                // Whoever connects and says nothing is answered nothing.
                Ok(0) | Err(_) => return,
                Ok(_) if line == "\r\n" => break,
                Ok(_) => head.push(line.trim_end().to_owned()),
            }
        }
        let field = |name: &str| {
            let lines = head.iter().filter_map(|line| line.split_once(": "));
            let mut found = lines.filter(|(key, _)| key.eq_ignore_ascii_case(name));
            found.next().map(|(_, value)| value.to_owned())
        };
        let length = field("content-length").map_or(0, |length| length.parse().unwrap());
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.unwrap();
        let (status, kind, answer) = if field("authorization").as_ref() == Some(&self.authorization) {
            self.serve(&head[0], &body).await
        } else {
            let why = "401 Unauthorized\r\nwww-authenticate: Basic realm=\"git\"";
            (why, "text/plain", Vec::new())
        };
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            answer.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&answer).await.unwrap();
        stream.shutdown().await.unwrap();
    }

    async fn serve(&self, request: &str, body: &[u8]) -> (&'static str, &'static str, Vec<u8>) {
        match request {
            "GET /work.git/info/refs?service=git-receive-pack HTTP/1.1" => {
                let mut answer = b"001f# service=git-receive-pack\n0000".to_vec();
                answer.extend(
                    self.receive_pack(&["--stateless-rpc", "--http-backend-info-refs"], body)
                        .await,
                );
                ("200 OK", "application/x-git-receive-pack-advertisement", answer)
            }
            "POST /work.git/git-receive-pack HTTP/1.1" => {
                let answer = self.receive_pack(&["--stateless-rpc"], body).await;
                ("200 OK", "application/x-git-receive-pack-result", answer)
            }
            _ => ("404 Not Found", "text/plain", request.into()),
        }
    }

    async fn receive_pack(&self, args: &[&str], input: &[u8]) -> Vec<u8> {
        let mut git = Command::new("git")
            .arg("receive-pack")
            .args(args)
            .arg(&self.repository)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // It reads all of it before it answers.
        git.stdin.take().unwrap().write_all(input).await.unwrap();
        let output = git.wait_with_output().await.unwrap();
        assert!(output.status.success(), "{output:?}");
        output.stdout
    }
}

async fn git_here(repository: &Path, args: &[&str]) -> String {
    let output = Command::new("git").arg("-C").arg(repository).args(args).output();
    let output = output.await.unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Where any line of standard input is found in the guest: files that were written since `/root/before` was made, on
/// whatever can be written, and environments and arguments of all processes. What it looks for is in none of its own.
const SEARCH: &str = "words=$(cat); \
    find / /dev /dev/shm /run /run/sandbox /run/silkd /tmp -xdev -type f -cnewer /root/before -print0 \
    | xargs -0 -r grep -lF -f <(printf %s \"$words\"); \
    grep -lF -f <(printf %s \"$words\") /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null; true";

async fn search(sandbox: &SandboxHandle, words: &str) -> Vec<String> {
    let search = sandbox.exec(["bash", "-c", SEARCH]).stdin(words.to_owned());
    let found = within(HANG, search.output()).await.unwrap();
    assert_eq!(found.status.how, How::Code(0), "{}", found.stderr_text());
    assert_eq!(found.stderr_text(), "");
    found.stdout_text().lines().map(str::to_owned).collect()
}

/// Configuration: a rule gives this credential, which it puts into this file, to what goes to the repository.
fn giving(world: &World, file: &Path, basic: &str) -> String {
    fs::write(file, basic).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
    let rules = format!(
        "[{{ id = \"git\", host = [\"allowed.test\"], ports = [{}], paths = [\"/work.git\"], secret = \"git\", \
         cleartext_secret = true }}]",
        world.port()
    );
    format!(
        "{}[egress.secret.git]\nheader = \"authorization\"\nprefix = \"Basic \"\nvalue = {{ file = {file:?} }}\n\
         hosts = [\"allowed.test\"]\n",
        world.config_with(&rules)
    )
}

#[tokio::test]
async fn git_push_through_the_door() {
    let secret = format!("hush-{:032x}", u128::from_ne_bytes(sandboxd::random::bytes()));
    let basic = STANDARD.encode(format!("me:{secret}"));
    let authorization = format!("Basic {basic}");
    let folder = tempfile::tempdir().unwrap();
    let repository = folder.path().join("work.git");
    git_here(folder.path(), &["init", "--quiet", "--bare", "work.git"]).await;
    let served = Served {
        repository: repository.clone(),
        authorization: authorization.clone(),
    };
    let world = World::with_origin(move |stream| served.clone().answer(stream)).await;
    let setup = Setup::qemu_of("debian").from_file().config(&world.config());
    let mut node = Node::full("debian", setup, 1).await;
    let sandbox = node.claim().await;
    let url = format!("http://allowed.test:{}/work.git", world.port());
    sh(
        &sandbox,
        &format!(
            "touch /root/before; git config --global user.name A; git config --global user.email a@example; \
             git init --quiet -b main /root/tree && cd /root/tree && git remote add origin {url} && echo 1 > first"
        ),
    )
    .await;
    let git = sandbox.git("/root/tree");
    git.add_all().await.unwrap();
    let head = git.commit("first").run().await.unwrap();

    // The guest has nothing to show, and no terminal on which it could be asked.
    let push = |git: &sandbox_sdk::git::Git| git.push().remote("origin").refspec("HEAD:refs/heads/main");
    let without = within(HANG, push(&git).run()).await;
    let error = refused(without, Reason::GitFailed);
    assert!(error.message().contains("could not read Username"), "{error}");
    assert_eq!(git_here(&repository, &["for-each-ref"]).await, "");

    // One call has it.
    let with = git
        .clone()
        .env("GIT_CONFIG_COUNT", "1")
        .env("GIT_CONFIG_KEY_0", format!("http.{url}.extraHeader"))
        .env("GIT_CONFIG_VALUE_0", format!("Authorization: {authorization}"));
    let pushed = within(HANG, push(&with).run()).await.unwrap();
    assert_eq!(pushed, head);
    let there = git_here(&repository, &["rev-parse", "refs/heads/main"]).await;
    assert_eq!(there.trim(), head);
    assert_eq!(git_here(&repository, &["show", "main:first"]).await, "1\n");
    refused(within(HANG, push(&git).run()).await, Reason::GitFailed);

    // Or the operator keeps it, and a rule gives it to what goes to the repository: no call has it.
    node.configure(&giving(&world, &folder.path().join("credential"), &basic));
    node.client().await.node().reload().await.unwrap();
    sh(&sandbox, "echo 2 > /root/tree/second").await;
    git.add_all().await.unwrap();
    let head = git.commit("second").run().await.unwrap();
    assert_eq!(within(HANG, push(&git).run()).await.unwrap(), head);
    assert_eq!(git_here(&repository, &["show", "main:second"]).await, "2\n");

    // And nothing of it stays.
    let words = format!("{secret}\n{basic}");
    assert_eq!(search(&sandbox, &words).await, [] as [String; 0]);
    let rows = sandbox.processes(false).await.unwrap().all().await.unwrap();
    let told = format!("{rows:?}");
    assert!(!told.contains(&secret) && !told.contains(&basic), "{told}");
    // Which would have been found.
    let plant = format!("printf %s {basic} > /root/tree/.git/planted; printf %s {secret} > /dev/shm/planted");
    sh(&sandbox, &plant).await;
    let process = sandbox.spawn(["sleep", "1000"]).env("PLANTED", secret.clone());
    let pid = process.await.unwrap().pid();
    assert_eq!(
        search(&sandbox, &words).await,
        [
            "/root/tree/.git/planted".to_owned(),
            "/dev/shm/planted".to_owned(),
            format!("/proc/{pid}/environ"),
        ]
    );
}
