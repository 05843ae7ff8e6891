//! QEMU's command line. Pure: descriptors are numbers here.

use std::ffi::OsString;

use sandbox_protocol::card::GUEST_MAC;

use crate::{
    image::Rootfs,
    words::{Accel, Size},
};

/// Machine type. q35 takes 20 to 60 ms more per start; microvm did not get through its timer set-up under TCG.
pub(super) const MACHINE: &str = "pc";

/// What a process is started to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Start<'a> {
    /// Boots a kernel; its memory is written through to the memory file.
    Boot {
        kernel: i32,
        initrd: i32,
        cmdline: &'a str,
    },
    /// Waits for device state; its memory is a private view of the memory file. It needs no kernel: the guest has it in
    /// memory already, and without the copy that QEMU would keep for the firmware a clone has 10 MiB less of its own.
    Load,
}

/// Numbers of the descriptors that the process gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fds {
    pub(super) memory: i32,
    pub(super) qmp: i32,
    pub(super) agent: i32,
    pub(super) outward: Outward,
    pub(super) console: i32,
}

/// How a guest reaches out; the number of the descriptor for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outward {
    /// By the port of its doors.
    Port(i32),
    /// By a network card, whose other end is a TAP.
    Card(i32),
}

/// The processor model: everything that the accelerator can do. Captures note which host that was.
pub(super) const fn cpu(accel: Accel) -> &'static str {
    match accel {
        Accel::Kvm => "host",
        Accel::Tcg | Accel::None => "max",
    }
}

/// The command line of one machine. What a capture and its clones must have in common is the same in both.
pub(super) fn machine(
    accel: Accel,
    size: Size,
    start: &Start<'_>,
    fds: Fds,
    rootfs: Option<(i32, &Rootfs)>,
) -> Vec<OsString> {
    let bytes = size.memory.0;
    let share = match start {
        Start::Boot { .. } => "on",
        Start::Load => "off",
    };
    let mut args = Args::default();
    args.hardening();
    args.pair(
        "-M",
        format!("{MACHINE},accel={accel},memory-backend=ram0,suppress-vmdesc=on"),
    );
    // A device-state file has no configuration section, and a capture is loaded the way that it was saved.
    args.pair("-global", "migration.send-configuration=off");
    // `merge=off`: sharing equal pages between tenants tells one about the other.
    args.pair(
        "-object",
        format!(
            "memory-backend-file,id=ram0,size={bytes},mem-path=/proc/self/fd/{},share={share},merge=off,dump=off",
            fds.memory
        ),
    );
    args.pair("-m", format!("{}k", bytes >> 10));
    args.pair("-smp", size.vcpus.0.to_string());
    args.pair("-cpu", cpu(accel));
    args.pair("-rtc", "base=utc");
    args.pair("-device", "virtio-rng-pci");
    args.pair("-device", "vmgenid,guid=auto");
    args.pair("-device", "virtio-serial-pci,id=vs0");
    args.port(1, "agent", fds.agent, "silkd.agent");
    match fds.outward {
        Outward::Port(fd) => args.port(2, "egress", fd, "silkd.egress"),
        Outward::Card(fd) => {
            // No vhost: there may be no such device, and a card that only speaks to doors needs no speed.
            args.pair("-netdev", format!("tap,id=net0,fd={fd},vhost=off"));
            // No option ROM: nothing boots from it, and its file is one more that the VMM would have to find.
            args.pair(
                "-device",
                format!("virtio-net-pci,netdev=net0,mac={},romfile=", mac(GUEST_MAC)),
            );
        }
    }
    if let Some((fd, rootfs)) = rootfs {
        args.pair("-add-fd", format!("fd={fd},set=2"));
        args.pair(
            "-blockdev",
            "driver=file,node-name=root-file,filename=/dev/fdset/2,read-only=on,locking=off",
        );
        args.pair(
            "-blockdev",
            "driver=raw,node-name=root,file=root-file,read-only=on",
        );
        args.pair(
            "-device",
            format!("virtio-blk-pci,drive=root,serial={}", rootfs.serial),
        );
    }
    args.pair("-add-fd", format!("fd={},set=1", fds.console));
    args.pair("-chardev", "file,id=console,path=/dev/fdset/1,append=on");
    args.pair("-serial", "chardev:console");
    args.monitor(fds.qmp);
    match start {
        Start::Boot {
            kernel,
            initrd,
            cmdline,
        } => {
            args.pair("-kernel", format!("/proc/self/fd/{kernel}"));
            args.pair("-initrd", format!("/proc/self/fd/{initrd}"));
            args.pair("-append", *cmdline);
        }
        Start::Load => args.pair("-incoming", "defer"),
    }
    args.0
}

fn mac(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

/// A QEMU without a machine, to be asked for its version.
pub(super) fn inquiry(qmp: i32) -> Vec<OsString> {
    let mut args = Args::default();
    args.hardening();
    args.pair("-M", "none");
    args.monitor(qmp);
    args.0
}

#[derive(Debug, Default)]
struct Args(Vec<OsString>);

impl Args {
    fn pair(&mut self, key: &str, value: impl Into<OsString>) {
        self.0.push(key.into());
        self.0.push(value.into());
    }

    /// `-no-reboot`: the firmware of a loaded guest is empty, so a reset must be an exit. No balloon and no free-page
    /// reporting: a discarded private page would show the template's old bytes again.
    fn hardening(&mut self) {
        for alone in ["-nodefaults", "-no-user-config", "-no-reboot"] {
            self.0.push(alone.into());
        }
        self.pair("-display", "none");
        self.pair(
            "-sandbox",
            "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        );
    }

    fn port(&mut self, nr: u8, id: &str, fd: i32, name: &str) {
        self.pair("-chardev", format!("socket,id={id},fd={fd},server=on,wait=off"));
        self.pair(
            "-device",
            format!("virtserialport,bus=vs0.0,nr={nr},chardev={id},name={name}"),
        );
    }

    fn monitor(&mut self, fd: i32) {
        self.pair("-chardev", format!("socket,id=qmp,fd={fd},server=on,wait=off"));
        self.pair("-mon", "chardev=qmp,mode=control");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::{MemBytes, Vcpus};

    fn line(start: &Start<'_>) -> String {
        line_with(start, Outward::Port(13))
    }

    fn line_with(start: &Start<'_>, outward: Outward) -> String {
        let size = Size {
            vcpus: Vcpus(2),
            memory: MemBytes::from_mib(256),
        };
        let fds = Fds {
            memory: 10,
            qmp: 11,
            agent: 12,
            outward,
            console: 14,
        };
        let args = machine(Accel::Tcg, size, start, fds, None);
        args.join(" ".as_ref()).into_string().unwrap()
    }

    #[test]
    fn a_clone_differs_from_its_template_only_where_it_must() {
        let boot = line(&Start::Boot {
            kernel: 20,
            initrd: 21,
            cmdline: "quiet",
        });
        let load = line(&Start::Load);
        assert_eq!(
            boot.replace("share=on", "share=off").replace(
                " -kernel /proc/self/fd/20 -initrd /proc/self/fd/21 -append quiet",
                " -incoming defer"
            ),
            load
        );
        assert!(load.contains("size=268435456,mem-path=/proc/self/fd/10"));
        assert!(load.contains(" -m 262144k -smp 2 -cpu max "));
    }

    #[test]
    fn a_guest_has_a_card_or_a_port_for_its_doors_and_never_both() {
        let card = "-netdev tap,id=net0,fd=13,vhost=off \
                    -device virtio-net-pci,netdev=net0,mac=02:73:62:78:00:02,romfile=";
        let port = "-chardev socket,id=egress,fd=13,server=on,wait=off \
                    -device virtserialport,bus=vs0.0,nr=2,chardev=egress,name=silkd.egress";
        let with = line_with(&Start::Load, Outward::Card(13));
        assert!(with.contains(card), "{with}");
        assert_eq!(with.replace(card, port), line(&Start::Load));
    }

    #[test]
    fn every_machine_is_hardened() {
        let plain = inquiry(3).join(" ".as_ref()).into_string().unwrap();
        for text in [line(&Start::Load), plain] {
            for part in [
                "-nodefaults -no-user-config -no-reboot",
                "-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
            ] {
                assert!(text.contains(part), "{text}");
            }
            assert!(!text.contains("balloon") && !text.contains("-netdev"), "{text}");
        }
    }
}
