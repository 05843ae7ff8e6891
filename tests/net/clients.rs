//! Programs as people use them, on both lanes, with nothing but the environment that a guest's programs find.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use harness::{HANG, Setup, World, within};
use sandbox_sdk::{How, Sandbox};
use sha2::{Digest as _, Sha256};
use silkd::door::{Doors, Listeners};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
};

use crate::{claims::Node, guest::Guest};

/// Serves the files below a folder.
async fn files(stream: TcpStream, root: Arc<PathBuf>) {
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if !matches!(stream.read_line(&mut line).await, Ok(n) if n > 0) {
            return;
        }
        let mut field = String::new();
        while stream.read_line(&mut field).await.is_ok_and(|n| n > 2) {
            field.clear();
        }
        let mut words = line.split([' ', '?']);
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let path = root.join(path.trim_start_matches('/'));
        // A folder's page lies in it.
        let path = if path.is_dir() {
            path.join("index.html")
        } else {
            path
        };
        let (status, body) = match fs::read(&path) {
            Ok(body) => ("200 OK", body),
            Err(_missing) => ("404 Not Found", Vec::new()),
        };
        let kind = match path.extension().and_then(|end| end.to_str()) {
            Some("html") => "text/html",
            _ => "application/octet-stream",
        };
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let body = if method == "HEAD" { &[][..] } else { &body };
        if stream.write_all(&[head.as_bytes(), body].concat()).await.is_err() {
            return;
        }
    }
}

/// Where a program of this machine lies.
fn find(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/bin", "/bin"].map(PathBuf::from);
    // The machine's own first: what a user has installed for himself may want more of his environment.
    let folders = more.into_iter().chain(std::env::split_paths(&path));
    let mut places = folders.map(|folder| folder.join(program));
    places
        .find(|place| place.is_file())
        .unwrap_or_else(|| panic!("{program} is missing: `deploy/deps test` brings it"))
}

/// Runs a script that prepares something.
fn prepare(folder: &Path, script: &str) {
    let done = Command::new("sh")
        .args(["-ec", script])
        .current_dir(folder)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{script}: {said}");
}

fn sha256(file: &Path) -> String {
    let digest = Sha256::digest(fs::read(file).unwrap());
    digest.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

/// A world with one of each kind of package, and where clients put what they fetch.
struct Clients {
    world: World,
    folder: TempDir,
    root: Arc<PathBuf>,
}

impl Clients {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = Arc::new(folder.path().join("root"));
        fs::create_dir(&*root).unwrap();
        let served = Arc::clone(&root);
        let world = World::with_origin(move |stream| files(stream, Arc::clone(&served))).await;
        let clients = Self { world, folder, root };
        clients.fill();
        clients
    }

    /// Lays out what origins of these clients serve; all of it is files.
    fn fill(&self) {
        let root = &*self.root;
        let (git, cargo) = (find("git"), find("cargo"));
        let [git, cargo] = [&git, &cargo].map(|path| path.display().to_string());
        fs::write(root.join("a"), "hello\n").unwrap();
        // pip: an index, and a wheel, which is an archive.
        let wheel = "import zipfile
with zipfile.ZipFile('simple/probe/probe-1.0-py3-none-any.whl', 'w') as wheel:
    meta = 'probe-1.0.dist-info/'
    wheel.writestr('probe.py', '')
    wheel.writestr(meta + 'METADATA', 'Metadata-Version: 2.1\\nName: probe\\nVersion: 1.0\\n')
    wheel.writestr(meta + 'WHEEL', 'Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    wheel.writestr(meta + 'RECORD', '')
";
        fs::create_dir_all(root.join("simple/probe")).unwrap();
        fs::write(root.join("wheel.py"), wheel).unwrap();
        prepare(root, &format!("{} wheel.py", find("python3").display()));
        let link = "<a href=\"probe-1.0-py3-none-any.whl\">probe-1.0-py3-none-any.whl</a>\n";
        fs::write(root.join("simple/probe/index.html"), link).unwrap();
        // git: a repository by the protocol that needs no program behind it.
        prepare(
            root,
            &format!(
                "mkdir work && cd work && {git} init -q && echo hello > a && {git} add a && \
                 {git} -c user.name=t -c user.email=t@t commit -qm t && \
                 {git} clone -q --bare . ../probe.git && cd ../probe.git && {git} update-server-info"
            ),
        );
        // cargo: a registry of one crate.
        let base = format!("http://allowed.test:{}", self.world.port());
        let manifest = "[package]\nname = \"probe\"\nversion = \"1.0.0\"\nedition = \"2024\"\n\
                        description = \"t\"\nlicense = \"MIT\"\n[workspace]\n";
        fs::create_dir_all(root.join("crate/src")).unwrap();
        fs::write(root.join("crate/Cargo.toml"), manifest).unwrap();
        fs::write(root.join("crate/src/lib.rs"), "").unwrap();
        prepare(
            root,
            &format!(
                "cd crate && {cargo} package -q --no-verify --allow-dirty --offline --target-dir ../packed"
            ),
        );
        fs::rename(
            root.join("packed/package/probe-1.0.0.crate"),
            root.join("probe.crate"),
        )
        .unwrap();
        fs::create_dir_all(root.join("index/pr/ob")).unwrap();
        let config = format!("{{\"dl\":\"{base}/{{crate}}.crate\"}}");
        fs::write(root.join("index/config.json"), config).unwrap();
        let entry = format!(
            "{{\"name\":\"probe\",\"vers\":\"1.0.0\",\"deps\":[],\"features\":{{}},\"yanked\":false,\"cksum\":\"{}\"}}\n",
            sha256(&root.join("probe.crate"))
        );
        fs::write(root.join("index/pr/ob/probe"), entry).unwrap();
        // apt: a repository of one package.
        let control =
            "Package: probe\nVersion: 1.0\nArchitecture: all\nMaintainer: t <t@t>\nDescription: t\n";
        fs::create_dir_all(root.join("deb/probe/DEBIAN")).unwrap();
        fs::write(root.join("deb/probe/DEBIAN/control"), control).unwrap();
        prepare(
            root,
            "dpkg-deb -b --root-owner-group deb/probe deb/probe_1.0_all.deb",
        );
        let deb = root.join("deb/probe_1.0_all.deb");
        let size = fs::metadata(&deb).unwrap().len();
        let packages = format!(
            "{control}Filename: ./probe_1.0_all.deb\nSize: {size}\nSHA256: {}\n",
            sha256(&deb)
        );
        fs::write(root.join("deb/Packages"), &packages).unwrap();
        let release = format!(
            "Date: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n {} {} Packages\n",
            sha256(&root.join("deb/Packages")),
            packages.len()
        );
        fs::write(root.join("deb/Release"), release).unwrap();
    }

    /// Each client with a script that fetches from this host into a folder of its own, and ends with `fetched`.
    fn scripts(&self, lane: &str, host: &str) -> Vec<(&'static str, String)> {
        let base = format!("http://{host}:{}", self.world.port());
        let out = |client: &str| {
            let folder = self.folder.path().join(format!("{lane}-{host}-{client}"));
            fs::create_dir_all(&folder).unwrap();
            folder
        };
        let [curl, wget, pip, git, cargo, apt] =
            ["curl", "wget", "pip3", "git", "cargo", "apt-get"].map(|name| find(name).display().to_string());
        // It starts its compiler by name.
        let rustc = find("rustc");
        let bin = rustc.parent().unwrap().display();
        let project = out("cargo");
        fs::create_dir_all(project.join("src")).unwrap();
        fs::write(project.join("src/lib.rs"), "").unwrap();
        fs::create_dir_all(project.join(".cargo")).unwrap();
        let config = format!("[registries.probe]\nindex = \"sparse+{base}/index/\"\n");
        fs::write(project.join(".cargo/config.toml"), config).unwrap();
        let manifest = "[package]\nname = \"user\"\nversion = \"1.0.0\"\nedition = \"2024\"\n[workspace]\n\
                        [dependencies]\nprobe = { version = \"1\", registry = \"probe\" }\n";
        fs::write(project.join("Cargo.toml"), manifest).unwrap();
        let debs = out("apt");
        for folder in ["state/lists/partial", "cache/archives/partial", "parts"] {
            fs::create_dir_all(debs.join(folder)).unwrap();
        }
        fs::write(debs.join("status"), "").unwrap();
        fs::write(debs.join("list"), format!("deb [trusted=yes] {base}/deb ./\n")).unwrap();
        let options = "-o Dir::Etc::sourcelist=$PWD/list -o Dir::Etc::sourceparts=$PWD/parts -o Dir::State=$PWD/state \
                       -o Dir::State::status=$PWD/status -o Dir::Cache=$PWD/cache -o APT::Sandbox::User=root \
                       -o Acquire::Retries=0 -o APT::Update::Error-Mode=any";
        [
            ("curl", format!("{curl} -fsS -o a {base}/a; grep -q hello a")),
            ("wget", format!("{wget} -q -O a {base}/a; grep -q hello a")),
            (
                "pip",
                format!(
                    "{pip} -q download --no-deps --no-cache-dir --disable-pip-version-check --trusted-host {host} \
                     --index-url {base}/simple/ probe; ls probe-1.0-py3-none-any.whl"
                ),
            ),
            ("git", format!("{git} clone -q {base}/probe.git clone; grep -q hello clone/a")),
            (
                "cargo",
                format!("PATH={bin}:$PATH CARGO_HOME=$PWD/home {cargo} fetch -q; ls home/registry/cache/*/probe-1.0.0.crate"),
            ),
            (
                "apt",
                format!("{apt} {options} -qq update; {apt} {options} -qq download probe; ls probe_1.0_all.deb"),
            ),
        ]
        .map(|(client, script)| {
            let folder = out(client);
            (client, format!("cd {}; set -e; {script}; echo fetched", folder.display()))
        })
        .into()
    }
}

/// Runs a script in a sandbox of lane none; whether it succeeded, and what it said.
async fn in_sandbox(sandbox: &Sandbox, script: &str) -> (bool, String) {
    let ran = sandbox
        .exec(["sh", "-c", script])
        .timeout(Duration::from_secs(30));
    let ran = within(HANG, ran.output()).await.unwrap();
    let said = format!("{}{}", ran.stdout_text(), ran.stderr_text());
    (ran.status.how == How::Code(0), said)
}

/// What silkd does for a guest that has a card: it listens on loopback, and its programs are told.
fn silkd_in(guest: &Guest) -> BTreeMap<String, String> {
    guest.space.command("ip link set lo up");
    let listeners = guest.space.run(|| Listeners::of_a_guest(true).unwrap());
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let env = listeners.env().into_iter();
    let env = env.map(|var| (text(&var.key), text(&var.value))).collect();
    guest.space.beside(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(async {
            Doors::default().listen(listeners).unwrap().await;
        });
    });
    env
}

/// Runs a script in a guest that has a card.
fn in_guest(guest: &Guest, env: &BTreeMap<String, String>, script: &str) -> (bool, String) {
    let (env, script) = (env.clone(), script.to_owned());
    guest.space.run(move || {
        let mut command = Command::new("timeout");
        command.args(["30", "sh", "-c", &script]).env_clear().envs(env);
        // As silkd gives them, besides its doors.
        command.env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        );
        command.env("HOME", std::env::var_os("HOME").unwrap_or_default());
        command.stdin(Stdio::null());
        let ran: io::Result<std::process::Output> = command.output();
        let ran = ran.unwrap();
        let said = [&ran.stdout[..], &ran.stderr].concat();
        (ran.status.success(), String::from_utf8_lossy(&said).into_owned())
    })
}

fn judged(client: &str, host: &str, (went, said): &(bool, String)) {
    if host == "allowed.test" {
        assert!(
            *went && said.ends_with("fetched\n"),
            "{client} from {host}: {said}"
        );
    } else {
        assert!(
            !*went && !said.contains("fetched"),
            "{client} from {host}: {said}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn door_client_matrix() {
    let clients = Clients::new().await;
    let config = clients.world.config();
    let daemon = Setup::stub().warm(1).config(&config).start().await;
    let client = daemon.client().await;
    let none = client.claim("default").wait(HANG).await.unwrap();
    for host in ["allowed.test", "other.test"] {
        for (client, script) in clients.scripts("none", host) {
            judged(client, host, &in_sandbox(&none, &script).await);
        }
    }
    none.release().await.unwrap();
    let node = Node::to(&clients.world, 2, 1, "", "").await;
    let client = node.client().await;
    let guarded = client.claim("default").wait(HANG).await.unwrap();
    let guest = node.guest(&guarded).await;
    let env = silkd_in(&guest);
    for host in ["allowed.test", "other.test"] {
        for (client, script) in clients.scripts("guarded", host) {
            judged(client, host, &in_guest(&guest, &env, &script));
        }
    }
    assert!(!clients.world.asked().iter().any(|name| name.starts_with("other")));
    drop(guest);
    guarded.release().await.unwrap();
}
