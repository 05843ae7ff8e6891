//! A scanner in front of hyper that lets through only what every reader of HTTP/1 reads alike. Sans I/O.
//!
//! hyper takes bare LF and `gzip, chunked`, drops Content-Length beside Transfer-Encoding and merges equal lengths before
//! a service can see them. So a head is held back until it is whole and sound, bodies are followed to the next head, and
//! nothing behind a fault is let through. CONNECT ends what hyper sees: its bytes are not HTTP. So does a request for
//! WebSocket, behind its head.

use bytes::{Bytes, BytesMut};
use sandbox_protocol::door::DoorReason;

/// Longest head; also of the trailers of a message.
const HEAD: usize = 64 * 1024;
/// Fields of a head or of trailers.
pub(super) const FIELDS: usize = 128;
/// Longest line of a chunk's size with its extensions.
const EXTENSION: usize = 256;
const CHUNK_LINE: usize = EXTENSION + 20;

/// The one protocol that a request may switch to.
pub(super) const WEBSOCKET: &str = "websocket";

/// What a scanner came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// It wants more bytes.
    More,
    /// A head of a tunnel: what is left of the input is not HTTP.
    Connect(Connect),
    /// A request for WebSocket was let through: what is left of the input waits for its answer.
    Upgrade,
    /// It cannot be read in one way, or is too large. Nothing behind it is looked at.
    Bad(DoorReason),
}

/// The head of a CONNECT.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connect {
    /// Its target, as it was written.
    pub target: String,
}

/// Where in a connection the scanner is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In a head, or before one.
    Head,
    /// In a body of so many bytes.
    Length(u64),
    /// In the line of a chunk's size.
    Size,
    /// In a chunk of so many bytes.
    Chunk(u64),
    /// In the line end behind a chunk.
    ChunkEnd,
    /// Behind the last chunk.
    Trailers,
    /// Nothing more is let through.
    Over,
}

/// The scanner of one connection's requests.
#[derive(Debug)]
pub struct Guard {
    state: State,
    /// How much of the input's front was looked at and is no end of a line or head.
    seen: usize,
}

impl Default for Guard {
    fn default() -> Self {
        Self::new()
    }
}

impl Guard {
    /// Before the first head.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            state: State::Head,
            seen: 0,
        }
    }

    /// Whether the next byte begins a head.
    #[must_use]
    pub const fn is_between(&self) -> bool {
        matches!(self.state, State::Head)
    }

    /// Moves what may pass from `input` to `out`; asked again when there is more input.
    pub fn feed(&mut self, input: &mut BytesMut, out: &mut BytesMut) -> Next {
        loop {
            let before = (self.state, input.len());
            match self.step(input, out) {
                Ok(None) if before == (self.state, input.len()) => return Next::More,
                Ok(None) => {}
                Ok(Some(over)) => {
                    self.state = State::Over;
                    return over;
                }
                Err(reason) => {
                    self.state = State::Over;
                    return Next::Bad(reason);
                }
            }
        }
    }

    fn step(&mut self, input: &mut BytesMut, out: &mut BytesMut) -> Result<Option<Next>, DoorReason> {
        match self.state {
            State::Head => {
                let Some(head) = self.block(input)? else {
                    return Ok(None);
                };
                let head_read = read_head(&head)?;
                if let Kind::Connect(target) = head_read {
                    return Ok(Some(Next::Connect(Connect { target })));
                }
                out.extend_from_slice(&head);
                self.state = match head_read {
                    Kind::Upgrade => return Ok(Some(Next::Upgrade)),
                    Kind::Length(0) | Kind::Connect(_) => State::Head,
                    Kind::Length(length) => State::Length(length),
                    Kind::Chunked => State::Size,
                };
            }
            State::Length(left) => {
                self.state = match pass(input, out, left) {
                    0 => State::Head,
                    left => State::Length(left),
                };
            }
            State::Chunk(left) => {
                self.state = match pass(input, out, left) {
                    0 => State::ChunkEnd,
                    left => State::Chunk(left),
                };
            }
            State::Size => {
                let Some(line) = self.line(input, CHUNK_LINE)? else {
                    return Ok(None);
                };
                let size = chunk_size(&line)?;
                out.extend_from_slice(&line);
                self.state = if size == 0 {
                    State::Trailers
                } else {
                    State::Chunk(size)
                };
            }
            State::ChunkEnd => {
                let Some(line) = self.line(input, 2)? else {
                    return Ok(None);
                };
                if line.len() != 2 {
                    return Err(DoorReason::BadFraming);
                }
                out.extend_from_slice(&line);
                self.state = State::Size;
            }
            State::Trailers => {
                // Without any, the block is an empty line.
                let trailers = if input.starts_with(b"\r\n") {
                    self.line(input, 2)?
                } else if input.len() < 2 && b"\r\n".starts_with(input) {
                    None
                } else {
                    self.block(input)?
                };
                let Some(trailers) = trailers else { return Ok(None) };
                read_trailers(&trailers)?;
                out.extend_from_slice(&trailers);
                self.state = State::Head;
            }
            State::Over => return Err(DoorReason::BadFraming),
        }
        Ok(None)
    }

    /// Takes lines up to and with an empty one.
    fn block(&mut self, input: &mut BytesMut) -> Result<Option<Bytes>, DoorReason> {
        while let Some(end) = self.line_end(input)? {
            let before = input.get(..end.saturating_sub(2)).unwrap_or_default();
            self.seen = end;
            // An empty line before anything else ends an empty block, which no head is.
            if before.is_empty() || before.ends_with(b"\r\n") {
                self.seen = 0;
                return Ok(Some(input.split_to(end).freeze()));
            }
            if end > HEAD {
                return Err(DoorReason::HeadTooLarge);
            }
        }
        if input.len() > HEAD {
            return Err(DoorReason::HeadTooLarge);
        }
        Ok(None)
    }

    /// Takes one line with its end.
    fn line(&mut self, input: &mut BytesMut, most: usize) -> Result<Option<Bytes>, DoorReason> {
        match self.line_end(input)? {
            Some(end) if end <= most => {
                self.seen = 0;
                Ok(Some(input.split_to(end).freeze()))
            }
            None if input.len() < most => Ok(None),
            Some(_) | None => Err(DoorReason::BadFraming),
        }
    }

    /// Past the next CRLF. A lone CR or LF, and NUL, are faults.
    fn line_end(&mut self, input: &[u8]) -> Result<Option<usize>, DoorReason> {
        let rest = input.get(self.seen..).unwrap_or_default();
        let Some(at) = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n' | 0)) else {
            self.seen = input.len();
            return Ok(None);
        };
        match (rest.get(at), rest.get(at + 1)) {
            (Some(b'\r'), Some(b'\n')) => Ok(Some(self.seen + at + 2)),
            (Some(b'\r'), None) => {
                self.seen += at;
                Ok(None)
            }
            (_, _) => Err(DoorReason::BadFraming),
        }
    }
}

/// Moves up to `left` bytes; gives how many are still to come.
fn pass(input: &mut BytesMut, out: &mut BytesMut, left: u64) -> u64 {
    let n = usize::try_from(left).unwrap_or(usize::MAX).min(input.len());
    out.extend_from_slice(&input.split_to(n));
    left.saturating_sub(u64::try_from(n).unwrap_or(u64::MAX))
}

/// What follows a head.
enum Kind {
    Connect(String),
    Upgrade,
    Length(u64),
    Chunked,
}

fn read_head(head: &[u8]) -> Result<Kind, DoorReason> {
    let bad = DoorReason::BadFraming;
    let mut rest = lines(head);
    let request = rest.next().ok_or(bad)?;
    let mut words = request.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(bad);
    };
    let is_old = match version {
        b"HTTP/1.1" => false,
        b"HTTP/1.0" => true,
        _ => return Err(bad),
    };
    if !is_token(method) || target.is_empty() || !target.iter().all(u8::is_ascii_graphic) {
        return Err(bad);
    }
    let mut fields = Fields::default();
    for line in rest {
        fields.take(line)?;
    }
    if !(fields.hosts == 1 || (is_old && fields.hosts == 0)) {
        return Err(bad);
    }
    let body = match (fields.length, fields.is_chunked) {
        (Some(_), true) => return Err(bad),
        (None, true) if is_old => return Err(bad),
        (None, true) => Kind::Chunked,
        (Some(length), false) => Kind::Length(length),
        (None, false) => Kind::Length(0),
    };
    if method != b"CONNECT" {
        // hyper would refuse it too, in its own words.
        if http::Uri::try_from(target).is_err() {
            return Err(DoorReason::BadTarget);
        }
        let fields = lines(head).skip(1).filter_map(field);
        let upgrades = !is_old && matches!(body, Kind::Length(0)) && asks_websocket(method, fields);
        return Ok(if upgrades { Kind::Upgrade } else { body });
    }
    match body {
        Kind::Length(0) => Ok(Kind::Connect(String::from_utf8_lossy(target).into_owned())),
        Kind::Length(_) | Kind::Chunked | Kind::Connect(_) | Kind::Upgrade => Err(bad),
    }
}

/// Whether a request of HTTP/1.1 without a body asks for WebSocket, and for nothing else. Asked with the same fields here
/// and by whoever answers it.
pub(super) fn asks_websocket<'a>(method: &[u8], fields: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> bool {
    let (mut asked, mut asked_else, mut named) = (false, false, false);
    for (name, value) in fields {
        if name.eq_ignore_ascii_case(b"upgrade") {
            let is_it = value.eq_ignore_ascii_case(WEBSOCKET.as_bytes());
            asked |= is_it;
            asked_else |= !is_it;
        } else if name.eq_ignore_ascii_case(b"connection") {
            let mut words = value.split(|byte| *byte == b',');
            named |= words.any(|word| word.trim_ascii().eq_ignore_ascii_case(b"upgrade"));
        }
    }
    method == b"GET" && asked && !asked_else && named
}

/// Name and value of a line.
fn field(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = line.iter().position(|byte| *byte == b':')?;
    let (name, value) = line.split_at_checked(at)?;
    Some((name, value.strip_prefix(b":")?.trim_ascii()))
}

fn read_trailers(block: &[u8]) -> Result<(), DoorReason> {
    let mut fields = Fields::default();
    for line in lines(block) {
        fields.take(line)?;
    }
    // What frames a message stands before its body, or nowhere.
    if fields.hosts > 0 || fields.length.is_some() || fields.is_chunked {
        return Err(DoorReason::BadFraming);
    }
    Ok(())
}

/// The lines of a block, without their ends and without the empty one at its end.
fn lines(block: &[u8]) -> impl Iterator<Item = &[u8]> {
    let block = block.strip_suffix(b"\r\n").unwrap_or(block);
    let block = block.strip_suffix(b"\r\n").unwrap_or(block);
    block
        .split(|byte| *byte == b'\n')
        .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
        .filter(move |_| !block.is_empty())
}

/// The fields that frame a message.
#[derive(Default)]
struct Fields {
    count: usize,
    hosts: usize,
    length: Option<u64>,
    is_chunked: bool,
}

impl Fields {
    fn take(&mut self, line: &[u8]) -> Result<(), DoorReason> {
        let bad = DoorReason::BadFraming;
        self.count += 1;
        if self.count > FIELDS {
            return Err(DoorReason::HeadTooLarge);
        }
        let (name, value) = field(line).ok_or(bad)?;
        // A name that begins with a space is a folded line, one that ends in a space is two names to two readers.
        if !is_token(name) || value.iter().any(|byte| byte.is_ascii_control() && *byte != b'\t') {
            return Err(bad);
        }
        if name.eq_ignore_ascii_case(b"host") {
            self.hosts += 1;
        } else if name.eq_ignore_ascii_case(b"content-length") {
            let length = decimal(value).ok_or(bad)?;
            if self.length.replace(length).is_some() {
                return Err(bad);
            }
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if self.is_chunked || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(bad);
            }
            self.is_chunked = true;
        }
        Ok(())
    }
}

fn is_token(bytes: &[u8]) -> bool {
    let good = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte);
    !bytes.is_empty() && bytes.iter().all(good)
}

/// Digits alone, and few enough that no reader overflows.
fn decimal(digits: &[u8]) -> Option<u64> {
    let plain = (1..=18).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(digits).ok().filter(|_| plain)?;
    text.parse().ok()
}

fn chunk_size(line: &[u8]) -> Result<u64, DoorReason> {
    let bad = DoorReason::BadFraming;
    let line = line.strip_suffix(b"\r\n").ok_or(bad)?;
    let at = line
        .iter()
        .position(|byte| !byte.is_ascii_hexdigit())
        .unwrap_or(line.len());
    let (digits, extension) = line.split_at_checked(at).ok_or(bad)?;
    let clean = extension.is_empty() || extension.starts_with(b";");
    let printable = extension
        .iter()
        .all(|byte| byte.is_ascii_graphic() || *byte == b' ');
    if !clean || !printable || extension.len() > EXTENSION || !(1..=15).contains(&digits.len()) {
        return Err(bad);
    }
    let text = std::str::from_utf8(digits).map_err(|_unreadable| bad)?;
    u64::from_str_radix(text, 16).map_err(|_unreadable| bad)
}
