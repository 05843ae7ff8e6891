//! The DNS door of lane guarded: it tells addresses of names that the policy allows something of, looked up and vetted as
//! for a dial. Whatever else is asked does not exist, and is asked of nobody.

use std::{
    io,
    net::{self, IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use hickory_resolver::proto::{
    op::{Edns, Message, MessageType, OpCode, Query, ResponseCode},
    rr::{
        DNSClass, RData, Record, RecordType,
        rdata::{A, AAAA, opt::EdnsOption},
    },
};
use sandbox_protocol::door::DoorReason;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, UdpSocket},
    sync::Semaphore,
    time::{Instant, sleep, timeout},
};

use super::{Accepted, HEAD_TIME, Visit, tap::Guest};
use crate::egress::{Door, DoorKind};

/// Bytes of an answer by UDP: what passes everywhere in one piece, and what a client takes that says nothing of it.
const LARGEST: u16 = 1_232;
const SMALLEST: u16 = 512;
/// Seconds for which a guest may keep an answer.
const TTL: u32 = 30;
/// Questions by UDP at once, and connections.
const AT_ONCE: usize = 16;
/// Questions by UDP in one second.
const PER_SECOND: u32 = 100;
/// Until the next is heard, when a socket failed.
const PAUSE: Duration = Duration::from_millis(50);
/// Extended errors (RFC 8914): the option, and "prohibited".
const EXTENDED_ERROR: u16 = 15;
const PROHIBITED: u16 = 18;

impl Door {
    /// Serves look-ups that come by these sockets, which one guest alone can reach. [`stop`](Self::stop) ends that, joins it
    /// and closes them.
    ///
    /// # Errors
    /// The kernel's, when they cannot be watched; then nothing is served.
    pub fn listen_dns(&self, datagrams: net::UdpSocket, streams: net::TcpListener) -> io::Result<()> {
        let datagrams = Arc::new(UdpSocket::from_std(datagrams)?);
        let streams = TcpListener::from_std(streams)?;
        let (door, group) = (self.clone(), self.group().clone());
        self.group().spawn("dns door", async move {
            tokio::select! {
                biased;
                () = group.stopping() => {}
                () = by_datagram(&door, &datagrams) => {}
                () = by_stream(&door, &streams) => {}
            }
        });
        Ok(())
    }
}

/// Serves for ever.
async fn by_datagram(door: &Door, socket: &Arc<UdpSocket>) {
    let places = Arc::new(Semaphore::new(AT_ONCE));
    let mut rate = Rate::new(Instant::now());
    let mut packet = vec![0; usize::from(LARGEST)];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut packet).await else {
            sleep(PAUSE).await;
            continue;
        };
        // Rubbish counts too.
        let is_in_time = rate.takes(Instant::now());
        let Some(question) = Question::read(packet.get(..length).unwrap_or_default()) else {
            continue;
        };
        let place = Arc::clone(&places).try_acquire_owned().ok();
        let Some(place) = place.filter(|_| is_in_time) else {
            tell(socket, &question.busy(), &question, from).await;
            continue;
        };
        let (door, socket, group) = (door.clone(), Arc::clone(socket), door.group().clone());
        door.group().clone().spawn("dns", async move {
            tokio::select! {
                biased;
                () = group.stopping() => {}
                answer = question.answer(&door) => tell(&socket, &answer, &question, from).await,
            }
            drop(place);
        });
    }
}

/// How many packets came in the second that began with the first of them. Pure.
#[derive(Debug)]
struct Rate {
    second: Instant,
    came: u32,
}

impl Rate {
    const fn new(now: Instant) -> Self {
        Self { second: now, came: 0 }
    }

    /// Counts one; false: there were as many already as are answered in a second.
    fn takes(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.second) >= Duration::from_secs(1) {
            *self = Self::new(now);
        }
        self.came = self.came.saturating_add(1);
        self.came <= PER_SECOND
    }
}

async fn tell(socket: &UdpSocket, answer: &Message, question: &Question, to: SocketAddr) {
    if let Some(bytes) = question.datagram(answer) {
        // A guest that does not read loses its answers.
        drop(socket.send_to(&bytes, to).await);
    }
}

/// An answer in one datagram. One that is too long is cut, and its client asks again by TCP.
fn cut(answer: &Message, most: u16) -> Option<Vec<u8>> {
    let fits = |bytes: &Vec<u8>| bytes.len() <= usize::from(most);
    let whole = answer.to_vec().ok().filter(fits);
    whole.or_else(|| answer.truncate().to_vec().ok().filter(fits))
}

/// Serves for ever.
async fn by_stream(door: &Door, listener: &TcpListener) {
    let places = Arc::new(Semaphore::new(AT_ONCE));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // What is beyond is reset.
                let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                    continue;
                };
                let (door, group) = (door.clone(), door.group().clone());
                door.group().clone().spawn("dns", async move {
                    tokio::select! {
                        biased;
                        () = group.stopping() => {}
                        _over = converse(&door, Guest::new(stream)) => {}
                    }
                    drop(place);
                });
            }
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// Answers one question after the other, until the guest ends or says nothing for a while.
async fn converse(door: &Door, mut io: Guest) -> io::Result<()> {
    loop {
        let packet = timeout(HEAD_TIME, async {
            let length = io.read_u16().await?;
            let mut packet = vec![0; usize::from(length)];
            io.read_exact(&mut packet).await?;
            Ok::<_, io::Error>(packet)
        });
        let Ok(Ok(packet)) = packet.await else { break };
        let Some(question) = Question::read(&packet) else {
            break;
        };
        let bytes = question.answer(door).await.to_vec().map_err(io::Error::other)?;
        let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
        io.write_all(&[&length.to_be_bytes()[..], &bytes].concat())
            .await?;
    }
    io.shutdown().await
}

/// A question that can be answered.
#[derive(Debug)]
pub struct Question(Message);

impl Question {
    /// Reads what a guest sent. Rubbish and answers are answered by nothing.
    #[must_use]
    pub fn read(packet: &[u8]) -> Option<Self> {
        let message = Message::from_vec(packet).ok()?;
        (message.message_type() == MessageType::Query).then_some(Self(message))
    }

    /// Longest answer by UDP.
    fn most(&self) -> u16 {
        let said = self.0.extensions().as_ref().map_or(SMALLEST, Edns::max_payload);
        said.clamp(SMALLEST, LARGEST)
    }

    fn reply(&self, code: ResponseCode) -> Message {
        let mut reply = Message::new();
        reply
            .set_id(self.0.id())
            .set_message_type(MessageType::Response)
            .set_op_code(self.0.op_code())
            .set_recursion_desired(self.0.recursion_desired())
            .set_recursion_available(true)
            .set_response_code(code);
        if let [query] = self.0.queries() {
            reply.add_query(query.clone());
        }
        if self.0.extensions().is_some() {
            let mut edns = Edns::new();
            edns.set_max_payload(LARGEST);
            reply.set_edns(edns);
        }
        reply
    }

    /// The answer that there is no room for it now.
    #[must_use]
    pub fn busy(&self) -> Message {
        self.reply(ResponseCode::ServFail)
    }

    /// An answer in one datagram of at most 1,232 bytes, and no longer than the client takes. Nothing, if not even the
    /// question fits.
    #[must_use]
    pub fn datagram(&self, answer: &Message) -> Option<Vec<u8>> {
        cut(answer, self.most())
    }

    async fn answer(&self, door: &Door) -> Message {
        let query = match self.0.queries() {
            [query] if self.0.op_code() == OpCode::Query => query,
            [_one] => return self.reply(ResponseCode::NotImp),
            _ => return self.reply(ResponseCode::FormErr),
        };
        if query.query_class() != DNSClass::IN {
            return self.reply(ResponseCode::Refused);
        }
        match Box::pin(look_up(door, query)).await {
            Ok(addresses) => {
                let mut reply = self.reply(ResponseCode::NoError);
                for data in addresses.into_iter().filter_map(|address| data(query, address)) {
                    reply.add_answer(Record::from_rdata(query.name().clone(), TTL, data));
                }
                reply
            }
            Err(DoorReason::ResolveTimeout | DoorReason::TooManyConnections) => self.busy(),
            Err(DoorReason::NameNotFound) => self.reply(ResponseCode::NXDomain),
            Err(reason) => {
                let mut reply = self.reply(ResponseCode::NXDomain);
                if let Some(edns) = reply.extensions_mut() {
                    let text = [&PROHIBITED.to_be_bytes()[..], reason.as_str().as_bytes()].concat();
                    edns.options_mut()
                        .insert(EdnsOption::Unknown(EXTENDED_ERROR, text));
                }
                reply
            }
        }
    }
}

/// What is told of an address to who asked this; nothing, if that was something else.
fn data(query: &Query, address: IpAddr) -> Option<RData> {
    match (query.query_type(), address) {
        (RecordType::A, IpAddr::V4(v4)) => Some(RData::A(A(v4))),
        (RecordType::AAAA, IpAddr::V6(v6)) => Some(RData::AAAA(AAAA(v6))),
        (_, IpAddr::V4(_) | IpAddr::V6(_)) => None,
    }
}

async fn look_up(door: &Door, query: &Query) -> Result<Vec<IpAddr>, DoorReason> {
    let Accepted {
        door,
        kind,
        armed,
        seat,
    } = Accepted::new(door, DoorKind::Dns);
    let armed = armed.ok_or_else(|| door.turn_away(kind, None).reason)?;
    let seat = seat.ok_or_else(|| door.turn_away(kind, Some(&armed)).reason)?;
    let visit = Visit::new(door, kind, Arc::clone(&armed), seat);
    let name = query.name().to_ascii();
    tokio::select! {
        biased;
        () = armed.cut.cancelled() => Err(DoorReason::NotArmed),
        found = visit.look_up(&name) => found.map_err(|denial| denial.reason),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use hickory_resolver::proto::{op::Query, rr::Name};

    use super::*;
    use crate::egress::tests::{Bench, within};

    const EXPLAINED: [u8; 2] = PROHIBITED.to_be_bytes();

    /// Where the door listens on loopback: by UDP, by TCP.
    fn listening(bench: &Bench) -> (SocketAddr, SocketAddr) {
        let datagrams = net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let streams = net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        datagrams.set_nonblocking(true).unwrap();
        streams.set_nonblocking(true).unwrap();
        let at = (datagrams.local_addr().unwrap(), streams.local_addr().unwrap());
        bench.door.listen_dns(datagrams, streams).unwrap();
        at
    }

    fn question(name: &str, kind: RecordType) -> Message {
        let mut message = Message::new();
        message.set_id(7).set_recursion_desired(true);
        message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
        let mut edns = Edns::new();
        edns.set_max_payload(4_096);
        message.set_edns(edns);
        message
    }

    async fn ask(at: SocketAddr, question: &Message) -> Message {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        socket.send_to(&question.to_vec().unwrap(), at).await.unwrap();
        let mut packet = vec![0; 4_096];
        let (length, _) = within(socket.recv_from(&mut packet)).await.unwrap();
        assert!(length <= usize::from(LARGEST));
        Message::from_vec(&packet[..length]).unwrap()
    }

    async fn ask_by_tcp(at: SocketAddr, question: &Message) -> Message {
        let mut stream = tokio::net::TcpStream::connect(at).await.unwrap();
        let bytes = question.to_vec().unwrap();
        stream
            .write_u16(u16::try_from(bytes.len()).unwrap())
            .await
            .unwrap();
        stream.write_all(&bytes).await.unwrap();
        let mut packet = vec![0; usize::from(within(stream.read_u16()).await.unwrap())];
        within(stream.read_exact(&mut packet)).await.unwrap();
        Message::from_vec(&packet).unwrap()
    }

    /// Why a name does not exist, as the answer says it.
    fn why(answer: &Message) -> String {
        assert_eq!(answer.response_code(), ResponseCode::NXDomain);
        assert_eq!(answer.answers().len(), 0);
        let option = answer
            .extensions()
            .as_ref()
            .unwrap()
            .option(EXTENDED_ERROR.into())
            .unwrap();
        let EdnsOption::Unknown(_, said) = option else {
            panic!("{option:?}")
        };
        assert_eq!(said[..2], EXPLAINED);
        String::from_utf8(said[2..].to_vec()).unwrap()
    }

    fn addresses(answer: &Message) -> Vec<IpAddr> {
        assert_eq!(answer.response_code(), ResponseCode::NoError);
        let address = |record: &Record| {
            let address = record.data().ip_addr();
            address.unwrap_or_else(|| panic!("{record}"))
        };
        assert!(answer.answers().iter().all(|record| record.ttl() <= TTL));
        answer.answers().iter().map(address).collect()
    }

    #[tokio::test]
    async fn dns_door_answers_only_allowed() {
        let bench = Bench::new().await;
        let (udp, tcp) = listening(&bench);
        let allowed = question("Allowed.test.", RecordType::A);
        assert_eq!(why(&ask(udp, &allowed).await), "not_armed");
        bench.arm();
        let answer = ask(udp, &allowed).await;
        assert_eq!(
            (answer.id(), addresses(&answer)),
            (7, vec![bench.origin.address.ip()])
        );
        assert_eq!(
            addresses(&ask_by_tcp(tcp, &allowed).await),
            [bench.origin.address.ip()]
        );
        // Other types of a name that is allowed are empty.
        for kind in [RecordType::AAAA, RecordType::TXT, RecordType::MX, RecordType::ANY] {
            let answer = ask(udp, &question("allowed.test.", kind)).await;
            assert_eq!(addresses(&answer), Vec::<IpAddr>::new(), "{kind}");
        }
        // What is denied does not exist, and nobody is asked for it.
        for name in ["other.test.", "secret.attacker.test.", "sub.allowed.test."] {
            for kind in [RecordType::A, RecordType::TXT] {
                assert_eq!(
                    why(&ask(udp, &question(name, kind)).await),
                    "host_not_allowed",
                    "{name}"
                );
            }
        }
        assert_eq!(
            why(&ask(udp, &question("127.0.0.1.", RecordType::A)).await),
            "address_literal"
        );
        let asked = bench.dns.asked();
        assert!(
            asked
                .iter()
                .all(|name| name.trim_end_matches('.') == "allowed.test"),
            "{asked:?}"
        );
        // Addresses are vetted: one bad one refuses the name.
        bench.dns.set("allowed.test", &["10.0.0.1"]);
        assert_eq!(why(&ask(udp, &allowed).await), "special_address");
        let mut status = allowed.clone();
        status.set_op_code(OpCode::Status);
        assert_eq!(ask(udp, &status).await.response_code(), ResponseCode::NotImp);
        bench.door.disarm();
        assert_eq!(why(&ask(udp, &allowed).await), "not_armed");
    }

    #[test]
    fn dns_answers_that_are_too_long_are_cut() {
        let asked = question("allowed.test.", RecordType::A);
        let name = asked.queries()[0].name().clone();
        let mut answer = Question(asked).reply(ResponseCode::NoError);
        for n in 0..60 {
            let data = RData::A(A::new(93, 184, 216, n));
            answer.add_answer(Record::from_rdata(name.clone(), TTL, data));
        }
        let whole = Message::from_vec(&cut(&answer, LARGEST).unwrap()).unwrap();
        assert_eq!((whole.truncated(), whole.answers().len()), (false, 60));
        let short = Message::from_vec(&cut(&answer, SMALLEST).unwrap()).unwrap();
        assert_eq!((short.truncated(), short.answers().len()), (true, 0));
        // What a client says of itself is taken within bounds.
        let most = |payload| {
            let mut asked = question("allowed.test.", RecordType::A);
            *asked.extensions_mut() = payload;
            Question(asked).most()
        };
        let says = |bytes| {
            let mut edns = Edns::new();
            edns.set_max_payload(bytes);
            Some(edns)
        };
        assert_eq!(
            [most(None), most(says(0)), most(says(900)), most(says(u16::MAX))],
            [512, 512, 900, 1_232]
        );
    }

    #[tokio::test]
    async fn dns_rubbish_is_not_answered_and_harms_nobody() {
        let bench = Bench::new().await;
        let (udp, _) = listening(&bench);
        bench.arm();
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let mut answer = question("allowed.test.", RecordType::A);
        answer.set_message_type(MessageType::Response);
        for rubbish in [&[][..], &[0; 11], &[0xff; 200], &answer.to_vec().unwrap()] {
            socket.send_to(rubbish, udp).await.unwrap();
        }
        // The one answer there is is the one to the last.
        let mut good = question("allowed.test.", RecordType::A);
        good.set_id(8);
        socket.send_to(&good.to_vec().unwrap(), udp).await.unwrap();
        let mut packet = [0; 512];
        let (length, _) = within(socket.recv_from(&mut packet)).await.unwrap();
        let answer = Message::from_vec(&packet[..length]).unwrap();
        assert_eq!(
            (answer.id(), addresses(&answer)),
            (8, vec![bench.origin.address.ip()])
        );
    }

    #[test]
    fn dns_rate_is_a_hundred_a_second() {
        let begun = Instant::now();
        let mut rate = Rate::new(begun);
        let mut taken = |millis: u64, times: u32| {
            let at = begun + Duration::from_millis(millis);
            (0..times).filter(|_| rate.takes(at)).count()
        };
        assert_eq!(taken(0, 60), 60);
        assert_eq!(taken(999, 60), 40);
        // Whoever goes on asking is heard again all the same.
        assert_eq!(taken(1_000, 1_000), 100);
        assert_eq!(taken(1_999, 1), 0);
        assert_eq!(taken(2_000, 1), 1);
    }

    /// How many of the answers say which of two things.
    fn codes(answers: &[Message]) -> (usize, usize) {
        let of = |code| {
            answers
                .iter()
                .filter(|answer| answer.response_code() == code)
                .count()
        };
        (of(ResponseCode::NXDomain), of(ResponseCode::ServFail))
    }

    /// All come before the first is answered: sixteen are taken, and the others are told at once that they are too many.
    #[tokio::test]
    async fn dns_questions_beyond_sixteen_at_once_are_told_so() {
        let bench = Bench::new().await;
        let (udp, _) = listening(&bench);
        bench.arm();
        // The door's task has its turn, and waits for what comes.
        tokio::task::yield_now().await;
        let socket = net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let denied = question("other.test.", RecordType::A).to_vec().unwrap();
        for _ in 0..40 {
            socket.send_to(&denied, udp).unwrap();
        }
        socket.set_nonblocking(true).unwrap();
        let socket = UdpSocket::from_std(socket).unwrap();
        let mut answers = Vec::new();
        let mut packet = vec![0; 4_096];
        for _ in 0..40 {
            let (length, _) = within(socket.recv_from(&mut packet)).await.unwrap();
            answers.push(Message::from_vec(&packet[..length]).unwrap());
        }
        assert_eq!(codes(&answers), (AT_ONCE, 40 - AT_ONCE));
        // Their places are free again.
        assert_eq!(
            codes(&[ask(udp, &question("other.test.", RecordType::A)).await]),
            (1, 0)
        );
    }

    /// One after the other, so that none is beyond sixteen: what goes unanswered is beyond the hundred of a second.
    #[tokio::test]
    async fn dns_questions_beyond_a_hundred_in_a_second_are_told_so() {
        let bench = Bench::new().await;
        let (udp, _) = listening(&bench);
        bench.arm();
        let denied = question("other.test.", RecordType::A);
        let until_busy = async {
            let mut answered = 0;
            while ask(udp, &denied).await.response_code() != ResponseCode::ServFail {
                answered += 1;
            }
            answered
        };
        assert!(within(until_busy).await >= PER_SECOND);
    }

    /// A client that resolves by itself and dials the address is judged by the name that it asked for.
    #[tokio::test]
    async fn dns_pinned_address_is_judged_by_its_name() {
        let bench = Bench::new().await;
        let (udp, _) = listening(&bench);
        bench.arm();
        let literal = format!("http://{}/", bench.origin.address);
        let line = async || {
            bench
                .get(&literal)
                .await
                .lines()
                .next()
                .unwrap_or_default()
                .to_owned()
        };
        assert_eq!(line().await, "HTTP/1.1 403 address_literal");
        assert_eq!(
            addresses(&ask(udp, &question("allowed.test.", RecordType::A)).await).len(),
            1
        );
        assert_eq!(line().await, "HTTP/1.1 200 OK");
        // The next claim knows nothing of it.
        bench.door.disarm();
        bench.arm();
        assert_eq!(line().await, "HTTP/1.1 403 address_literal");
    }
}
