//! The packet filter of a lane, as a value, and the one batch that puts it there. Pure.
//!
//! Every rule begins with the prefix of our interfaces' names, so it touches no other; no rule belongs to one sandbox, so
//! a TAP is locked before it exists.

use std::net::Ipv4Addr;

use super::{
    DOOR_PORTS, GUEST_ADDRESS, HOST_ADDRESS, PREFIX,
    netlink::{Message, Nest, attributes, flag},
};

/// The table's name in the family `inet`.
pub(super) const TABLE: &str = "sandboxd";
/// The multicast group that hears of every change.
pub(super) const CHANGES: u32 = 7;

const SUBSYSTEM: u16 = 10;
const INET: u8 = 1;
const NEW_TABLE: u16 = 0;
const GET_TABLE: u16 = 1;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const NEW_RULE: u16 = 6;
const NEW_GENERATION: u16 = 15;
const GET_GENERATION: u16 = 16;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// Length of the fixed header.
const HEADER: usize = 4;

/// Where a chain hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hook {
    Input,
    Forward,
    Output,
}

impl Hook {
    const fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Forward => "forward",
            Self::Output => "output",
        }
    }

    const fn number(self) -> u32 {
        match self {
            Self::Input => 1,
            Self::Forward => 2,
            Self::Output => 3,
        }
    }
}

/// Which of its two ends a packet is looked at by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Source,
    Destination,
}

/// What carries a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transport {
    Tcp,
    Udp,
}

/// A condition of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Match {
    /// It came by one of our interfaces.
    CameByOurs,
    /// It leaves by one of our interfaces.
    LeavesByOurs,
    /// It is not IPv4.
    NotIpv4,
    /// That end is another address.
    Not(End, Ipv4Addr),
    /// That end is this port.
    Port(Transport, End, u16),
}

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Accept,
    /// Counted.
    Drop,
}

/// All conditions must hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) chain: Hook,
    pub(super) matches: Vec<Match>,
    pub(super) verdict: Verdict,
}

/// The whole table, in order.
pub(super) fn rules() -> Vec<Rule> {
    use End::{Destination, Source};
    let rule = |chain, matches: &[Match], verdict| Rule {
        chain,
        matches: matches.to_vec(),
        verdict,
    };
    let input =
        |matches: &[Match], verdict| rule(Hook::Input, &[&[Match::CameByOurs], matches].concat(), verdict);
    let output =
        |matches: &[Match], verdict| rule(Hook::Output, &[&[Match::LeavesByOurs], matches].concat(), verdict);
    let mut rules = vec![
        input(&[Match::NotIpv4], Verdict::Drop),
        input(&[Match::Not(Source, GUEST_ADDRESS)], Verdict::Drop),
        input(&[Match::Not(Destination, HOST_ADDRESS)], Verdict::Drop),
    ];
    let ports = |end| DOOR_PORTS.map(|(transport, port)| Match::Port(transport, end, port));
    rules.extend(ports(Destination).map(|port| input(&[port], Verdict::Accept)));
    rules.push(input(&[], Verdict::Drop));
    rules.push(rule(Hook::Forward, &[Match::CameByOurs], Verdict::Drop));
    rules.push(rule(Hook::Forward, &[Match::LeavesByOurs], Verdict::Drop));
    rules.push(output(&[Match::NotIpv4], Verdict::Drop));
    rules.extend(ports(Source).map(|port| output(&[port], Verdict::Accept)));
    rules.push(output(&[], Verdict::Drop));
    rules
}

/// The batch that replaces the table whole, whatever stands there: its beginning, its inside, its end. It is done only
/// if nobody changed anything since `generation`; the one behind it is ours then.
pub(super) fn replacement(generation: u32, rules: &[Rule]) -> (Message, Vec<Message>, Message) {
    let table = || message(NEW_TABLE, flag::CREATE).text(1, TABLE);
    // Deleting what is not there would fail the whole batch, hence the first of the three.
    let mut inside = vec![table(), message(DELETE_TABLE, 0).text(1, TABLE), table()];
    for hook in [Hook::Input, Hook::Forward, Hook::Output] {
        let place = Nest::default().number(1, hook.number()).number(2, 0);
        let chain = message(NEW_CHAIN, flag::CREATE)
            .text(1, TABLE)
            .text(3, hook.name())
            .nested(4, &place)
            .attribute(5, &ACCEPT.to_be_bytes())
            .text(7, "filter");
        inside.push(chain);
    }
    inside.extend(rules.iter().map(rule_message));
    let begin = edge(BATCH_BEGIN).attribute(1, &generation.to_be_bytes());
    (begin, inside, edge(BATCH_END))
}

/// Asks which generation of all tables is in force.
pub(super) fn generation_request() -> Message {
    Message::new(SUBSYSTEM << 8 | GET_GENERATION, 0, &[0; HEADER])
}

/// Asks for our table; the kernel says ENOENT where there is none.
pub(super) fn table_request() -> Message {
    message(GET_TABLE, 0).text(1, TABLE)
}

/// The generation that a message tells, if it tells one.
pub(super) fn generation(kind: u16, body: &[u8]) -> Option<u32> {
    if kind != SUBSYSTEM << 8 | NEW_GENERATION {
        return None;
    }
    let (_, value) = attributes(body, HEADER)
        .into_iter()
        .find(|(kind, _)| *kind == 1)?;
    Some(u32::from_be_bytes(value.try_into().ok()?))
}

const ACCEPT: u32 = 1;
const DROP: u32 = 0;
const FIRST_REGISTER: u32 = 1;

fn message(kind: u16, flags: u16) -> Message {
    Message::new(SUBSYSTEM << 8 | kind, flags, &[INET, 0, 0, 0])
}

fn edge(kind: u16) -> Message {
    let [high, low] = SUBSYSTEM.to_be_bytes();
    Message::new(kind, 0, &[0, 0, high, low])
}

fn rule_message(rule: &Rule) -> Message {
    let mut list = Nest::default();
    for one in &rule.matches {
        list = match_expressions(list, *one);
    }
    let code = match rule.verdict {
        Verdict::Accept => ACCEPT,
        Verdict::Drop => {
            list = expression(list, "counter", &Nest::default());
            DROP
        }
    };
    let verdict = Nest::default().nested(2, &Nest::default().number(1, code));
    list = expression(
        list,
        "immediate",
        &Nest::default().number(1, 0).nested(2, &verdict),
    );
    // CREATE and APPEND: at the end of its chain.
    message(NEW_RULE, flag::CREATE | 0x800)
        .text(1, TABLE)
        .text(2, rule.chain.name())
        .nested(4, &list)
}

fn match_expressions(list: Nest, one: Match) -> Nest {
    const INCOMING_NAME: u32 = 6;
    const OUTGOING_NAME: u32 = 7;
    const FAMILY: u32 = 15;
    const TRANSPORT: u32 = 16;
    const IPV4: u8 = 2;
    match one {
        // Without its NUL a name is a prefix.
        Match::CameByOurs => compare(meta(list, INCOMING_NAME), true, PREFIX.as_bytes()),
        Match::LeavesByOurs => compare(meta(list, OUTGOING_NAME), true, PREFIX.as_bytes()),
        Match::NotIpv4 => compare(meta(list, FAMILY), false, &[IPV4]),
        Match::Not(end, address) => {
            let offset = match end {
                End::Source => 12,
                End::Destination => 16,
            };
            compare(payload(list, 1, offset, 4), false, &address.octets())
        }
        Match::Port(transport, end, port) => {
            let protocol = match transport {
                Transport::Tcp => 6,
                Transport::Udp => 17,
            };
            let offset = match end {
                End::Source => 0,
                End::Destination => 2,
            };
            let list = compare(meta(list, TRANSPORT), true, &[protocol]);
            compare(payload(list, 2, offset, 2), true, &port.to_be_bytes())
        }
    }
}

fn expression(list: Nest, name: &str, inside: &Nest) -> Nest {
    let mut text = name.as_bytes().to_vec();
    text.push(0);
    list.nested(1, &Nest::default().attribute(1, &text).nested(2, inside))
}

fn meta(list: Nest, key: u32) -> Nest {
    expression(
        list,
        "meta",
        &Nest::default().number(1, FIRST_REGISTER).number(2, key),
    )
}

fn payload(list: Nest, base: u32, offset: u32, length: u32) -> Nest {
    let inside = Nest::default()
        .number(1, FIRST_REGISTER)
        .number(2, base)
        .number(3, offset)
        .number(4, length);
    expression(list, "payload", &inside)
}

fn compare(list: Nest, equal: bool, value: &[u8]) -> Nest {
    let inside = Nest::default()
        .number(1, FIRST_REGISTER)
        .number(2, u32::from(!equal))
        .nested(3, &Nest::default().attribute(1, value));
    expression(list, "cmp", &inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A packet at a hook, as far as rules look at it.
    #[derive(Debug, Clone, Copy)]
    struct Packet {
        hook: Hook,
        came: bool,
        leaves: bool,
        ends: Option<(Ipv4Addr, Ipv4Addr)>,
        ports: Option<(Transport, u16, u16)>,
    }

    fn holds(one: Match, packet: Packet) -> bool {
        match one {
            Match::CameByOurs => packet.came,
            Match::LeavesByOurs => packet.leaves,
            Match::NotIpv4 => packet.ends.is_none(),
            Match::Not(End::Source, address) => packet.ends.is_none_or(|(from, _)| from != address),
            Match::Not(End::Destination, address) => packet.ends.is_none_or(|(_, to)| to != address),
            Match::Port(transport, end, port) => packet.ports.is_some_and(|(found, from, to)| {
                found == transport
                    && port
                        == match end {
                            End::Source => from,
                            End::Destination => to,
                        }
            }),
        }
    }

    fn judge(packet: Packet) -> Verdict {
        rules()
            .iter()
            .filter(|rule| rule.chain == packet.hook)
            .find(|rule| rule.matches.iter().all(|one| holds(*one, packet)))
            .map_or(Verdict::Accept, |rule| rule.verdict)
    }

    const ODD: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

    #[test]
    fn every_rule_begins_with_our_interfaces() {
        for rule in rules() {
            assert!(
                matches!(
                    rule.matches.first(),
                    Some(Match::CameByOurs | Match::LeavesByOurs)
                ),
                "{rule:?}"
            );
        }
    }

    #[test]
    fn only_door_ports_get_in_and_only_their_answers_out() {
        for transport in [Transport::Tcp, Transport::Udp] {
            for port in 0..=u16::MAX {
                let door = DOOR_PORTS.contains(&(transport, port));
                let wanted = if door { Verdict::Accept } else { Verdict::Drop };
                let input = Packet {
                    hook: Hook::Input,
                    came: true,
                    leaves: false,
                    ends: Some((GUEST_ADDRESS, HOST_ADDRESS)),
                    ports: Some((transport, 4_000, port)),
                };
                let output = Packet {
                    hook: Hook::Output,
                    came: false,
                    leaves: true,
                    ends: Some((HOST_ADDRESS, GUEST_ADDRESS)),
                    ports: Some((transport, port, 4_000)),
                };
                assert_eq!(
                    (judge(input), judge(output)),
                    (wanted, wanted),
                    "{transport:?} {port}"
                );
            }
        }
    }

    #[test]
    fn odd_addresses_families_and_forwards_are_dropped_and_others_untouched() {
        let door = Packet {
            hook: Hook::Input,
            came: true,
            leaves: false,
            ends: Some((GUEST_ADDRESS, HOST_ADDRESS)),
            ports: Some((Transport::Tcp, 4_000, 3_128)),
        };
        assert_eq!(judge(door), Verdict::Accept);
        for ends in [None, Some((ODD, HOST_ADDRESS)), Some((GUEST_ADDRESS, ODD))] {
            assert_eq!(judge(Packet { ends, ..door }), Verdict::Drop, "{ends:?}");
        }
        assert_eq!(judge(Packet { ports: None, ..door }), Verdict::Drop);
        for (came, leaves) in [(true, false), (false, true), (true, true)] {
            let forward = Packet {
                hook: Hook::Forward,
                came,
                leaves,
                ..door
            };
            assert_eq!(judge(forward), Verdict::Drop);
        }
        for hook in [Hook::Input, Hook::Forward, Hook::Output] {
            let foreign = Packet {
                hook,
                came: false,
                leaves: false,
                ends: None,
                ports: None,
            };
            assert_eq!(judge(foreign), Verdict::Accept, "{hook:?}");
        }
    }

    #[test]
    fn a_generation_is_read_from_its_message_only() {
        let told = [0, 0, 0, 0, 8, 0, 1, 0, 0, 0, 1, 2];
        assert_eq!(generation(SUBSYSTEM << 8 | NEW_GENERATION, &told), Some(258));
        assert_eq!(generation(SUBSYSTEM << 8 | NEW_RULE, &told), None);
        assert_eq!(generation(SUBSYSTEM << 8 | NEW_GENERATION, &told[..10]), None);
    }
}
