//! Programs that were alive when their template was captured: each clone has them, and what they had in mind.
//!
//! The machines of this template have no generation device, so that nobody but silkd tells the kernel that it was
//! cloned.

use std::{
    collections::BTreeSet,
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
/// What a warm-up has started ends with it, unless it was given a control group of its own.
const WARMUP: &str = r#"
set -e
mkdir /lively /sys/fs/cgroup/work/lively
mkdir -p /etc/sandbox/renew.d
cat > /lively/log.sh <<'END'
while :; do
	read -r before < /run/sandbox/generation
	bytes=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' ')
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
cat > /etc/sandbox/renew.d/20-seed <<'END'
#!/bin/sh
echo "seed $(head -c 4 /dev/urandom | od -An -tu4)" > /lively/renewed.ask
END
chmod +x /etc/sandbox/renew.d/20-seed
cat > /lively/start.sh <<'END'
echo 0 > /sys/fs/cgroup/work/lively/cgroup.procs
sh /lively/log.sh &
for name in renewed forgotten; do
	mkfifo /lively/$name.ask /lively/$name.said
	awk -f /lively/random.awk <> /lively/$name.ask 1<> /lively/$name.said &
done
END
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
    Node::on(state, setup).await
}

const FOUR: usize = 4;

#[tokio::test]
async fn frozen_work_writes_nothing_before_reseed() {
    let node = lively().await;
    let all = clones(&node, FOUR).await;
    let later = "until [ $(grep -c '^2 2 ' /lively/log) -ge 3 ]; do sleep 0.1; done; cat /lively/log";
    let logs = within(HANG, in_each(&all, later)).await;
    let of = |log: &str, generations: &str| -> Vec<String> {
        let lines = log.lines().filter_map(|line| line.strip_prefix(generations));
        lines.map(ToOwned::to_owned).collect()
    };
    // What was logged in the template is in all of them, and not a line more: none wrote before its new life began.
    let template = of(&logs[0], "1 1 ");
    assert!(!template.is_empty());
    for log in &logs {
        assert!(of(log, "1 1 ") == template, "{log}\n---\n{}", logs[0]);
    }
    // From there on no bytes come twice, in whichever clone. Those of the line on which the capture fell are nobody's.
    let drawn: Vec<_> = logs.iter().flat_map(|log| of(log, "2 2 ")).collect();
    assert!(drawn.iter().all(|bytes| bytes.len() == 32), "{drawn:?}");
    let before: BTreeSet<_> = template.iter().collect();
    assert!(drawn.iter().all(|bytes| !before.contains(bytes)));
    assert_eq!(distinct(&drawn), drawn.len(), "{drawn:?}");
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
