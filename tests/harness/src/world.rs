//! What guests reach out to: a name server and an origin, both on loopback.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UdpSocket},
    task::JoinHandle,
};

/// The address that origins listen on: no interface has it, so that it may be opened.
pub const ORIGIN: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// A name server and an origin; they end when this is dropped.
#[derive(Debug)]
pub struct World {
    dns: SocketAddr,
    origin: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for World {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl World {
    /// Names that end in `.test` lead to the origin; no other name has an address. The origin answers each GET with
    /// `hello from PATH`, and whatever else is sent by the same bytes.
    ///
    /// # Panics
    /// No port can be had.
    pub async fn start() -> Self {
        Self::with_origin(answers).await
    }

    /// The same with another origin, which does this with each connection.
    ///
    /// # Panics
    /// No port can be had.
    pub async fn with_origin<F>(answer: impl Fn(TcpStream) -> F + Send + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let listener = TcpListener::bind((ORIGIN, 0)).await.unwrap();
        let (dns, origin) = (socket.local_addr().unwrap(), listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let tasks = [
            tokio::spawn(names(socket, ORIGIN, {
                let asked = Arc::clone(&asked);
                move |name| asked.lock().unwrap().push(name)
            })),
            tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    // It ends with its connection.
                    drop(tokio::spawn(answer(stream)));
                }
            }),
        ];
        Self {
            dns,
            origin,
            asked,
            tasks,
        }
    }

    /// Port of the origin.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.origin.port()
    }

    /// Names that were looked up.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    /// Configuration: these names and addresses, and a policy `build` of pool `default` that allows `allowed.test`.
    #[must_use]
    pub fn config(&self) -> String {
        self.config_with(&format!(
            "[{{ id = \"t\", host = [\"allowed.test\"], ports = [{}] }}]",
            self.port()
        ))
    }

    /// The same with other rules.
    #[must_use]
    pub fn config_with(&self, rules: &str) -> String {
        format!(
            "pool.default.egress = \"build\"\n\
             egress.policy.build.rules = {rules}\n\
             egress.resolver.servers = [\"{}\"]\n\
             egress.internal_allow = [{{ cidr = \"{ORIGIN}/32\", ports = [{}] }}]\n",
            self.dns,
            self.port()
        )
    }
}

/// Answers for names: those that end in `.test` lead to one address, and no other has any. Each that is asked for is told.
pub async fn names(socket: UdpSocket, leads_to: Ipv4Addr, mut asked: impl FnMut(String)) {
    let known: BTreeMap<u16, Vec<u8>> = BTreeMap::from([(1, leads_to.octets().to_vec())]);
    let mut packet = [0; 512];
    while let Ok((n, from)) = socket.recv_from(&mut packet).await {
        let Some(question) = packet.get(..n) else { continue };
        let Some((name, kind, end)) = question_of(question) else {
            continue;
        };
        let is_known = name.ends_with(".test");
        asked(name);
        let data = known.get(&kind).filter(|_| is_known);
        let code = if is_known { 0x80 } else { 0x83 };
        let mut answer = question.get(..2).unwrap_or_default().to_vec();
        answer.extend([0x81, code, 0, 1, 0, u8::from(data.is_some()), 0, 0, 0, 0]);
        answer.extend(question.get(12..end).unwrap_or_default());
        if let Some(data) = data {
            answer.extend([0xc0, 12]);
            answer.extend(kind.to_be_bytes());
            answer.extend([0, 1, 0, 0, 0, 0, 0, 4]);
            answer.extend(data);
        }
        if socket.send_to(&answer, from).await.is_err() {
            return;
        }
    }
}

/// Name, kind, and where the question ends.
fn question_of(packet: &[u8]) -> Option<(String, u16, usize)> {
    let (mut labels, mut at) = (Vec::new(), 12);
    loop {
        let length = usize::from(*packet.get(at)?);
        if length == 0 {
            break;
        }
        let label = packet.get(at + 1..at + 1 + length)?;
        labels.push(String::from_utf8_lossy(label).to_lowercase());
        at += 1 + length;
    }
    let kind = u16::from_be_bytes([*packet.get(at + 1)?, *packet.get(at + 2)?]);
    Some((labels.join("."), kind, at + 5))
}

async fn answers(mut stream: TcpStream) {
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        let n = stream.read(&mut chunk).await.unwrap_or(0);
        bytes.extend_from_slice(chunk.get(..n).unwrap_or_default());
        let text = String::from_utf8_lossy(&bytes);
        if text.starts_with("GET ") && text.ends_with("\r\n\r\n") {
            let path = text.split(' ').nth(1).unwrap_or_default();
            let body = format!("hello from {path}\n");
            let answer = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            if stream.write_all(answer.as_bytes()).await.is_err() {
                return;
            }
            bytes.clear();
        } else if n == 0 {
            drop(stream.write_all(&bytes).await);
            return;
        }
    }
}
