//! The packet filter of this thread's namespace: our table put there, and asked about.

use rustix::io::Errno;

use super::{
    NetError,
    netlink::{Family, Socket, fault},
    ruleset,
};

/// How often somebody may get in between our look and our commit before that is a failure.
const TRIES: u32 = 8;
const LACKS: &str = "CONFIG_NF_TABLES and CONFIG_NF_TABLES_INET";

/// A socket to the packet filter.
#[derive(Debug)]
pub(super) struct Filter(Socket);

impl Filter {
    pub(super) fn open() -> Result<Self, NetError> {
        let failed = |errno| NetError::lacking("open the packet filter", LACKS, None, fault(errno));
        Socket::open(Family::Netfilter).map(Self).map_err(failed)
    }

    pub(super) const fn sent(&self) -> u64 {
        self.0.sent()
    }

    /// Which generation is in force.
    pub(super) fn generation(&mut self) -> Result<u32, NetError> {
        let failed = |errno| NetError::lacking("ask the packet filter", LACKS, None, fault(errno));
        let replies = self.0.ask(&ruleset::generation_request()).map_err(failed)?;
        replies
            .iter()
            .find_map(|reply| ruleset::generation(reply.kind, &reply.body))
            .ok_or_else(|| failed(Errno::PROTO))
    }

    /// Whether there is a table of our name.
    pub(super) fn stands(&mut self) -> Result<bool, NetError> {
        match self.0.ask(&ruleset::table_request()) {
            Ok(replies) => Ok(!replies.is_empty()),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(NetError::lacking(
                "ask the packet filter",
                LACKS,
                None,
                fault(errno),
            )),
        }
    }

    /// Replaces our table whole, in one commit; gives the generation that this made.
    pub(super) fn replace(&mut self) -> Result<u32, NetError> {
        let rules = ruleset::rules();
        let mut outcome = Err(Errno::AGAIN);
        for _ in 0..TRIES {
            let before = self.generation()?;
            let (begin, inside, end) = ruleset::replacement(before, &rules);
            outcome = self.0.batch(&begin, &inside, &end).map(|()| before);
            if outcome != Err(Errno::from_raw_os_error(libc::ERESTART)) {
                break;
            }
        }
        match outcome {
            // Zero stands for "none" and is passed over.
            Ok(u32::MAX) => Ok(1),
            Ok(before) => Ok(before + 1),
            Err(errno) => Err(NetError::lacking(
                "set the packet filter",
                LACKS,
                None,
                fault(errno),
            )),
        }
    }
}
