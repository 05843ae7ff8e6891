//! Numbers that both ends of a wire use. Relations between them are asserted at compile time.
//!
//! Invariant 17: an unread stream stalls only itself, at every hop: (data streams x stream window) stays below
//! the connection window.

/// HTTP/2 window of one stream, on every hop where nothing else is said.
pub const STREAM_WINDOW: u32 = 64 * 1024;
/// The same of a stream that brings a guest's output: to the host, while few are open, and to its client. A
/// stream moves at most a window for each time that both ends are woken: docs/performance.md, section 3, has what that costs.
pub const WIDE_WINDOW: u32 = 256 * 1024;
/// Streams of a link up to which each has [`WIDE_WINDOW`]; with more, each has [`STREAM_WINDOW`].
pub const WIDE_STREAMS: u32 = 32;
/// Connection window that the SDK gives sandboxd.
pub const CLIENT_CONNECTION_WINDOW: u32 = 65 * 1024 * 1024;
/// Connection window that sandboxd's API gives its clients.
pub const API_CONNECTION_WINDOW: u32 = 17 * 1024 * 1024;
/// Streams that one API connection may have open.
pub const API_STREAMS: u32 = 256;
/// Connection window that silkd gives the host.
pub const GUEST_CONNECTION_WINDOW: u32 = 16 * 1024 * 1024;
/// Connection window that the host gives silkd.
pub const HOST_CONNECTION_WINDOW: u32 = 40 * 1024 * 1024;
/// Streams that one link may have open.
pub const LINK_STREAMS: u32 = 512;
/// Of them, streams that take input of any length from a client.
pub const LINK_INPUT_STREAMS: u32 = 192;
/// Connections that one door of a sandbox has at most.
pub const DOOR_CONNECTIONS: usize = 256;
/// Streams that the egress link may have open: two doors full, and some to be refused.
pub const EGRESS_STREAMS: u32 = 520;
/// Connection window of the egress link, both directions.
pub const EGRESS_CONNECTION_WINDOW: u32 = 33 * 1024 * 1024;
/// HTTP/2 frame size on a link; shorter than [`crate::link::BREAK_ZEROS`], so that no legal stream holds a BREAK.
pub const LINK_FRAME: u32 = 16 * 1024;
/// Largest header list, both directions.
pub const HEADER_LIST: u32 = 16 * 1024;
/// Bytes buffered for sending per stream.
pub const SEND_BUFFER: usize = 64 * 1024;
/// Largest message that is decoded, everywhere.
pub const MESSAGE_IN: usize = 2 * 1024 * 1024;
/// Largest data chunk that silkd takes.
pub const CHUNK_IN: usize = 256 * 1024;
/// Largest data chunk that silkd sends.
pub const CHUNK_OUT: usize = 64 * 1024;

/// Seconds after which an idle API connection is pinged, and after which silence closes it.
pub const KEEPALIVE_SECS: u64 = 20;
/// `grpc-message` of a guest that is passed on, in bytes.
pub const GUEST_STATUS_MESSAGE: usize = 1024;
/// `grpc-status-details-bin` of a guest that is passed on, in bytes.
pub const GUEST_STATUS_DETAILS: usize = 4096;

/// Claim: labels, and their sizes.
pub const LABELS: usize = 16;
/// Longest key of a label.
pub const LABEL_KEY: usize = 63;
/// Longest value of a label.
pub const LABEL_VALUE: usize = 255;
/// Longest request key.
pub const REQUEST_KEY: usize = 128;
/// Environment and user of a claim together.
pub const CLAIM_ENV: usize = 64 * 1024;
/// Longest wait in line.
pub const WAIT_MAX_MS: u32 = 600_000;
/// Wait in line when none is asked for.
pub const WAIT_DEFAULT_MS: u32 = 2_000;
/// Longest lease that a pool may allow: 30 days.
pub const LEASE_MAX_SECS: u32 = 30 * 24 * 3600;
/// Rows of a page of List: the most, and the default.
pub const PAGE_MAX: u32 = 1_000;
/// Rows of a page when none is asked for.
pub const PAGE_DEFAULT: u32 = 100;
/// Longest name of a pool, template, size or tenant.
pub const NAME: usize = 32;

/// Rules of the egress policy that a claim brings, and its size in bytes.
pub const CLAIM_RULES: usize = 64;
/// See [`CLAIM_RULES`].
pub const CLAIM_POLICY: usize = 64 * 1024;
/// Rules of a named egress policy, and its hosts.
pub const POLICY_RULES: usize = 256;
/// See [`POLICY_RULES`].
pub const POLICY_HOSTS: usize = 4096;

/// One argument or environment string of a program.
pub const ARG_STRING: usize = 128 * 1024 - 1;
/// All arguments and environment of a program together.
pub const ARGS_TOTAL: usize = 1024 * 1024;
/// Longest path.
pub const PATH: usize = 4095;
/// Programs running at once in a guest.
pub const PROCESSES: usize = 1024;
/// From a timeout signal to KILL, when none is asked for.
pub const GRACE_DEFAULT_MS: u32 = 2_000;
/// Terminals of a guest.
pub const TTYS: usize = 64;
/// Columns or rows of a terminal.
pub const TTY_SIDE: u32 = 4096;
/// Sessions of a guest.
pub const SESSIONS: usize = 64;
/// Watches of a guest, and the directories below all of them.
pub const WATCHES: usize = 64;
/// See [`WATCHES`].
pub const WATCH_DIRECTORIES: usize = 65_536;
/// Port forwards of a guest.
pub const FORWARDS: usize = 128;
/// Language servers of a guest.
pub const LSP_SERVERS: usize = 16;
/// Exited processes that a guest keeps.
pub const EXITED_KEPT: usize = 4096;
/// Log of a process when none is asked for, and the most.
pub const LOG_DEFAULT: u64 = 1024 * 1024;
/// See [`LOG_DEFAULT`].
pub const LOG_MAX: u64 = 16 * 1024 * 1024;
/// Each output of a Run when nothing is asked for, and the most.
pub const RUN_OUTPUT_DEFAULT: u64 = 1024 * 1024;
/// See [`RUN_OUTPUT_DEFAULT`].
pub const RUN_OUTPUT_MAX: u64 = 8 * 1024 * 1024;
/// All Runs of a guest together.
pub const RUN_OUTPUT_ALL: u64 = 32 * 1024 * 1024;
/// Text of one command of a session.
pub const SESSION_COMMAND: usize = 1024 * 1024;
/// One message of a language server's protocol.
pub const LSP_MESSAGE: usize = 8 * 1024 * 1024;

/// Agent protos that this build speaks.
pub const PROTO_MIN: u32 = 1;
/// See [`PROTO_MIN`].
pub const PROTO_MAX: u32 = 1;

const _: () = assert!(LINK_INPUT_STREAMS * STREAM_WINDOW < GUEST_CONNECTION_WINDOW);
const _: () = assert!(
    WIDE_STREAMS * WIDE_WINDOW + (LINK_STREAMS - WIDE_STREAMS) * STREAM_WINDOW < HOST_CONNECTION_WINDOW
);
const _: () = assert!(API_STREAMS * WIDE_WINDOW < CLIENT_CONNECTION_WINDOW);
const _: () = assert!(EGRESS_STREAMS * STREAM_WINDOW < EGRESS_CONNECTION_WINDOW);
const _: () = assert!(2 * DOOR_CONNECTIONS < EGRESS_STREAMS as usize);
const _: () = assert!(API_STREAMS * STREAM_WINDOW < API_CONNECTION_WINDOW);
const _: () = assert!((LINK_FRAME as usize) < crate::link::BREAK_ZEROS);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inv_17_stalled_readers() {
        for (wide, streams, connection) in [
            (0, LINK_INPUT_STREAMS, GUEST_CONNECTION_WINDOW),
            (WIDE_STREAMS, LINK_STREAMS, HOST_CONNECTION_WINDOW),
            (0, API_STREAMS, API_CONNECTION_WINDOW),
            (API_STREAMS, API_STREAMS, CLIENT_CONNECTION_WINDOW),
            (0, EGRESS_STREAMS, EGRESS_CONNECTION_WINDOW),
        ] {
            let unread = u64::from(wide) * u64::from(WIDE_WINDOW)
                + u64::from(streams - wide) * u64::from(STREAM_WINDOW);
            assert!(unread < u64::from(connection));
        }
    }
}
