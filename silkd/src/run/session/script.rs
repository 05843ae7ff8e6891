//! What a session's shell is given to read: pure text.
//!
//! bash reads its *script* from a pipe of ours. For each command three things stand in it: a line that reads the text
//! (so many bytes, whatever they are) into a variable, a line that has it evaluated, a line that reports. The report's
//! nonce is still unread in the pipe while the command runs. Neither a loop nor a function surrounds the command, so
//! `break`, `return` and `declare` mean what they mean at the top. The pipes are closed to it, and no child ever has
//! them: bash keeps its own copies close-on-exec.
//!
//! What the last command left is as it left it: `$?`, and `-x` and `-v`, which are off while our own lines run.

use bytes::Bytes;

/// Where the shell finds its script.
pub(super) const SCRIPT: i32 = 250;
/// Where it reports.
pub(super) const REPORT: i32 = 251;

/// What tells a report from whatever else may be written to its pipe: 128 random bits, as text.
pub type Nonce = [u8; 32];

/// The nonce of these bits.
#[must_use]
pub fn nonce(bits: u128) -> Nonce {
    let mut nonce = Nonce::default();
    let text = format!("{bits:032x}");
    nonce.copy_from_slice(text.as_bytes());
    nonce
}

/// How the last command left the shell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Left {
    /// `$?`.
    pub(super) status: u8,
    /// `set -x`.
    pub(super) traces: bool,
    /// `set -v`.
    pub(super) echoes: bool,
}

/// The program and its arguments.
pub(super) fn argv() -> Vec<Bytes> {
    let script = format!("/proc/self/fd/{SCRIPT}");
    let words = ["bash", "--noprofile", "--norc", &script];
    words
        .iter()
        .map(|word| Bytes::copy_from_slice(word.as_bytes()))
        .collect()
}

/// What comes first: aliases work as at a prompt, and who is too old says so by ending.
pub(super) fn opening(nonce: Nonce) -> Bytes {
    let mut text = String::from(
        "BASH_ARGV0=bash; (( BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404 )) || exit 1\n\
         shopt -s expand_aliases\n",
    );
    text.push_str(&reporting(nonce));
    text.into()
}

/// A command, in the pieces that it is written in.
pub(super) fn command(text: Bytes, left: Left, nonce: Nonce) -> [Bytes; 3] {
    let Left {
        status,
        traces,
        echoes,
    } = left;
    let set = |wanted: bool, what: &'static str| if wanted { what } else { "" };
    // Whatever makes `$?` what it was must neither end a shell with `-e` nor leave anything behind: a function that
    // removes itself and its text, in a list whose end is not reached.
    let resume = if status == 0 { "__silkd" } else { "__silkd && :" };
    let read = format!(
        "{{ LC_ALL=C \\builtin read -r -N {} -u {SCRIPT} __silkd || \\builtin exit 1; \
         __silkd() {{ \\builtin unset -f __silkd; \\builtin unset -v __silkd; {}{}\\builtin return {status}; }} \
         2>/dev/null; }} 2>/dev/null\n",
        text.len(),
        set(traces, "\\builtin set -x; "),
        set(echoes, "\\builtin set -v; "),
    );
    let mut rest = format!("\\builtin eval '{resume}\n'\"$__silkd\" {SCRIPT}>&- {REPORT}>&-\n");
    rest.push_str(&reporting(nonce));
    [read.into(), text, rest.into()]
}

/// After an open quote bash takes the first line for a part of it: that one is empty.
fn reporting(nonce: Nonce) -> String {
    let mut line = String::from("\n{ \\builtin printf '%s\\0' ");
    // Hexadecimal digits.
    line.extend(nonce.iter().map(|byte| char::from(*byte)));
    // A shell that cannot report must not live on in silence.
    let rest = format!(
        " \"$?\" \"$-\" \"${{PWD-}}\" >&{REPORT} || \\builtin exit 1; \\builtin set +xv; }} 2>/dev/null\n"
    );
    line.push_str(&rest);
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(text: &'static [u8], left: Left) -> String {
        let pieces = command(Bytes::from_static(text), left, nonce(0xabc));
        String::from_utf8(pieces.concat()).unwrap()
    }

    #[test]
    fn a_command_is_read_by_its_length_and_reported_under_its_nonce() {
        let whole = whole(b"echo 'open", Left::default());
        let (read, rest) = whole.split_once("echo 'open").unwrap();
        assert!(
            read.contains("read -r -N 10 -u 250") && read.ends_with('\n'),
            "{read}"
        );
        assert!(rest.starts_with("\\builtin eval"), "{rest}");
        assert!(rest.contains("00000000000000000000000000000abc"), "{rest}");
        assert!(!read.contains("abc"), "the nonce comes after the text");
    }

    #[test]
    fn what_was_left_is_made_again() {
        let none = whole(b":", Left::default());
        assert!(
            !none.contains("builtin set -") && none.contains("return 0"),
            "{none}"
        );
        let left = Left {
            status: 7,
            traces: true,
            echoes: true,
        };
        let all = whole(b":", left);
        assert!(
            all.contains("set -x; \\builtin set -v; \\builtin return 7"),
            "{all}"
        );
        assert!(all.contains("'__silkd && :"), "{all}");
    }
}
