//! Programs that were alive when their template was captured: each clone has them, and what they had in mind.
//!
//! The machines here have no generation device, so that nobody but silkd tells the kernel that it was cloned.

use std::{
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    os::unix::fs::PermissionsExt as _,
    path::Path,
};

use harness::{HANG, Setup, within};

use crate::{
    clones::{clones, distinct, in_each},
    node::{Golden, Node, seeded_with},
};

/// Counts the generation devices that the guest's firmware tells of.
pub(crate) const GENERATION_DEVICES: &str = "ls /sys/bus/acpi/devices | grep -c QEMUVGID; true";

/// Runs QEMU without the generation device that the engine gives each machine.
const QEMU: &str = r#"#!/bin/sh
left=$#
while [ "$left" -gt 0 ]; do
	case "$1 $2" in
		"-device vmgenid,"*)
			shift 2
			left=$((left - 2))
			;;
		*)
			set -- "$@" "$1"
			shift
			left=$((left - 1))
			;;
	esac
done
exec qemu-system-x86_64 "$@"
"#;

/// What the warm-up leaves: a daemon that logs random bytes, each time with the generation before and after it drew
/// them, and two interpreters with a random generator of their own, of which a hook of the image seeds one anew.
///
/// Another hook keeps what it reads first of `/dev/urandom` in `/lively/first`: 16 bytes a line, and so often that two
/// clones that draw from one state have much in common, though one of them has drawn some more before.
///
/// What a warm-up has started ends with it, unless it was given a control group of its own. It begins when the kernel is not
/// so young any more that it seeds itself anew each second, which would hide that nobody has told it to.
const WARMUP: &str = r#"
set -e
mkdir /lively /sys/fs/cgroup/work/lively
mkdir -p /etc/sandbox/renew.d
cat > /lively/log.sh <<'END'
while :; do
	read -r before < /run/sandbox/generation
	bytes=$(dd if=/dev/urandom bs=16 count=64 2> /dev/null | od -An -v -tx1 | tr -d ' \n')
	read -r after < /run/sandbox/generation
	echo "$before $after $bytes" >> /lively/log
	# As fast as it can in the template, so that it would be seen to run in a clone that is none yet.
	[ "$after" = 1 ] || sleep 0.2
done
END
cat > /lively/random.awk <<'END'
BEGIN { srand(1) }
$1 == "seed" { srand($2); next }
{ printf "%.9f %.9f\n", rand(), rand(); fflush() }
END
cat > /etc/sandbox/renew.d/10-first <<'END'
#!/bin/sh
dd if=/dev/urandom bs=16 count=256 2> /dev/null | od -An -v -tx1 > /lively/first
END
cat > /etc/sandbox/renew.d/20-seed <<'END'
#!/bin/sh
echo "seed $(head -c 4 /dev/urandom | od -An -tu4)" > /lively/renewed.ask
END
chmod +x /etc/sandbox/renew.d/*
cat > /lively/start.sh <<'END'
echo 0 > /sys/fs/cgroup/work/lively/cgroup.procs
sh /lively/log.sh &
for name in renewed forgotten; do
	mkfifo /lively/$name.ask /lively/$name.said
	awk -f /lively/random.awk <> /lively/$name.ask 1<> /lively/$name.said &
done
END
until [ $(cut -d . -f 1 /proc/uptime) -ge 8 ]; do sleep 0.5; done
sh /lively/start.sh > /dev/null 2>&1
# Warm: each has drawn.
for name in renewed forgotten; do
	echo draw > /lively/$name.ask
	read -r drawn < /lively/$name.said
done
until [ -s /lively/log ]; do sleep 0.1; done
"#;

#[derive(Debug, Clone, Copy)]
struct Lively;

impl Golden for Lively {
    fn name(self) -> String {
        let mut hasher = DefaultHasher::new();
        (QEMU, WARMUP).hash(&mut hasher);
        format!("lively-{:016x}", hasher.finish())
    }

    fn setup(self, state: &Path) -> Setup {
        let qemu = state.join("qemu");
        fs::write(&qemu, QEMU).unwrap();
        fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755)).unwrap();
        // Another account could not enter the folder.
        Setup::qemu()
            .from_file()
            .warm(1)
            .config("pool.default.warm_max = 1\nengine.vm_user = \"root\"")
            .config(&format!("engine.qemu = {qemu:?}"))
            .config(&format!("template.default.warmup = [\"sh\", \"-c\", {WARMUP:?}]"))
    }
}

/// A daemon whose clones are of this template.
pub(crate) async fn lively() -> Node {
    let state = seeded_with(Lively).await;
    let setup = Lively.setup(state.path());
    let node = Node::on(state, setup).await;
    // Before that the template is still looked at, and a claim would be booted.
    node.until_warm(1).await;
    node
}

const FOUR: usize = 4;

#[tokio::test]
async fn frozen_work_writes_nothing_before_reseed() {
    let node = lively().await;
    let all = clones(&node, FOUR).await;
    let later = "until [ $(grep -c '^2 2 ' /lively/log) -ge 3 ]; do sleep 0.1; done; cat /lively/log";
    let logs = within(HANG, in_each(&all, later)).await;
    let of = |log: &str, generations: &str| -> Vec<String> {
        // The last one may be on its way.
        let (whole, _) = log.rsplit_once('\n').unwrap();
        let lines = whole.lines().filter_map(|line| line.strip_prefix(generations));
        lines.map(ToOwned::to_owned).collect()
    };
    // What was logged in the template is in all of them, and not a line more: none wrote before its new life began.
    let template = of(&logs[0], "1 1 ");
    assert!(!template.is_empty());
    for log in &logs {
        assert!(of(log, "1 1 ") == template, "{log}\n---\n{}", logs[0]);
    }
    // From there on no bytes come twice, in whichever clone. Those of the line on which the capture fell are nobody's.
    let draws = |lines: Vec<String>| -> Vec<String> {
        assert!(lines.iter().all(|line| line.len() == 64 * 32), "{lines:?}");
        let lines = lines.iter().flat_map(|line| line.as_bytes().chunks(32));
        lines
            .map(|draw| String::from_utf8_lossy(draw).into_owned())
            .collect()
    };
    let mut all = draws(template);
    all.extend(logs.iter().flat_map(|log| draws(of(log, "2 2 "))));
    assert_eq!(distinct(&all), all.len(), "draws that come once");
}

#[tokio::test]
async fn hook_reseeds_a_warm_interpreter() {
    let node = lively().await;
    let all = clones(&node, FOUR).await;
    let draw =
        |name| format!("echo draw > /lively/{name}.ask; read -r drawn < /lively/{name}.said; echo $drawn");
    // The one that no hook knows of goes on where the template was: so it would be with the other.
    let forgotten = within(HANG, in_each(&all, &draw("forgotten"))).await;
    assert_eq!(distinct(&forgotten), 1, "{forgotten:?}");
    let renewed = within(HANG, in_each(&all, &draw("renewed"))).await;
    assert_eq!(distinct(&renewed), FOUR, "{renewed:?}");
    assert!(renewed.iter().all(|drawn| drawn.len() > 20), "{renewed:?}");
}
