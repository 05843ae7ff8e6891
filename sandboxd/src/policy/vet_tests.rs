use std::net::IpAddr;

use sandbox_protocol::door::DoorReason;

use super::*;

const NOBODY: Who<'static> = Who { pool: "", tenant: "" };

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap_or_else(|_| panic!("{text}"))
}

fn refused(vetting: &Vetting, text: &str) -> Option<DoorReason> {
    vetting
        .judge(&[ip("203.0.113.77")], ip(text), 443, NOBODY)
        .refused
}

#[test]
fn addr_range_table() {
    let vetting = Vetting::default();
    // First and last of each range, and their neighbours outside of it.
    for (first, last, before, after) in [
        ("0.0.0.0", "0.255.255.255", "", "1.0.0.0"),
        ("10.0.0.0", "10.255.255.255", "9.255.255.255", "11.0.0.0"),
        ("100.64.0.0", "100.127.255.255", "100.63.255.255", "100.128.0.0"),
        ("127.0.0.0", "127.255.255.255", "126.255.255.255", "128.0.0.0"),
        ("169.254.0.0", "169.254.255.255", "169.253.255.255", "169.255.0.0"),
        ("172.16.0.0", "172.31.255.255", "172.15.255.255", "172.32.0.0"),
        ("192.0.0.0", "192.0.0.255", "191.255.255.255", "192.0.1.0"),
        ("192.0.2.0", "192.0.2.255", "192.0.1.255", "192.0.3.0"),
        ("192.31.196.0", "192.31.196.255", "192.31.195.255", "192.31.197.0"),
        ("192.52.193.0", "192.52.193.255", "192.52.192.255", "192.52.194.0"),
        ("192.88.99.0", "192.88.99.255", "192.88.98.255", "192.88.100.0"),
        ("192.168.0.0", "192.168.255.255", "192.167.255.255", "192.169.0.0"),
        ("192.175.48.0", "192.175.48.255", "192.175.47.255", "192.175.49.0"),
        ("198.18.0.0", "198.19.255.255", "198.17.255.255", "198.20.0.0"),
        ("198.51.100.0", "198.51.100.255", "198.51.99.255", "198.51.101.0"),
        ("203.0.113.0", "203.0.113.255", "203.0.112.255", "203.0.114.0"),
        ("224.0.0.0", "255.255.255.255", "223.255.255.255", ""),
        ("2001::", "2001:1ff:ffff::", "2000:ffff::", "2001:200::"),
        ("2001:db8::", "2001:db8:ffff::", "2001:db7:ffff::", "2001:db9::"),
        ("2002::", "2002:ffff::", "2001:ffff::", "2003::"),
        (
            "2620:4f:8000::",
            "2620:4f:8000:ffff::",
            "2620:4f:7fff::",
            "2620:4f:8001::",
        ),
        ("3fff::", "3fff:fff::", "3ffe:ffff::", "3fff:1000::"),
        ("::", "1fff:ffff::", "", "2000::"),
        ("4000::", "ffff::", "3fff:ffff::", ""),
        ("5f00::", "fe80::1", "", ""),
        ("fc00::", "fec0::1", "", ""),
        ("100::", "64:ff9b:1::1", "", ""),
    ] {
        for inside in [first, last] {
            assert_eq!(
                refused(&vetting, inside),
                Some(DoorReason::SpecialAddress),
                "{inside}"
            );
        }
        for outside in [before, after].into_iter().filter(|text| !text.is_empty()) {
            assert_eq!(refused(&vetting, outside), None, "{outside}");
        }
    }
    for metadata in [
        "169.254.169.254",
        "169.254.169.253",
        "169.254.170.2",
        "169.254.170.23",
        "168.63.129.16",
        "100.100.100.200",
        "fd00:ec2::254",
        "fd20:ce::254",
    ] {
        assert_eq!(
            refused(&vetting, metadata),
            Some(DoorReason::SpecialAddress),
            "{metadata}"
        );
    }
    assert_eq!(refused(&vetting, "169.254.1.1"), Some(DoorReason::OwnAddress));
}

#[test]
fn addr_embedded_forms() {
    let vetting = Vetting {
        nat64: vec!["2600:64::/96".parse().unwrap()],
        ..Vetting::default()
    };
    for (text, expected) in [
        ("::ffff:a9fe:a9fe", Some(DoorReason::SpecialAddress)),
        ("::ffff:8.8.8.8", None),
        ("64:ff9b::7f00:1", Some(DoorReason::SpecialAddress)),
        ("64:ff9b::808:808", None),
        ("2600:64::a00:1", Some(DoorReason::SpecialAddress)),
        ("2600:64::808:808", None),
        ("64:ff9b::cb00:714d", Some(DoorReason::OwnAddress)),
        ("::127.0.0.1", Some(DoorReason::SpecialAddress)),
        ("::", Some(DoorReason::SpecialAddress)),
        ("::1", Some(DoorReason::SpecialAddress)),
        ("::ffff:0:7f00:1", Some(DoorReason::SpecialAddress)),
        ("2002:7f00:1::", Some(DoorReason::SpecialAddress)),
        ("2001::7f00:1", Some(DoorReason::SpecialAddress)),
        ("2600::5efe:7f00:1", Some(DoorReason::SpecialAddress)),
        ("2600::200:5efe:7f00:1", Some(DoorReason::SpecialAddress)),
        ("2600::", None),
    ] {
        assert_eq!(refused(&vetting, text), expected, "{text}");
    }
    // The forms that never become an address at all.
    for text in ["0x7f.1", "127.1", "[fe80::1%25eth0]"] {
        assert!(Authority::parse(text, Some(80)).is_err(), "{text}");
    }
    let mapped = Authority::parse("[::ffff:127.0.0.1]:80", None).unwrap();
    assert_eq!(mapped.host(), &Host::Address(ip("127.0.0.1")));
}

#[test]
fn addr_internal_allow_is_narrow() {
    let open = |net: &str| Internal {
        net: net.parse().unwrap(),
        ports: [443].into(),
        pools: Opening::Named(["p".parse().unwrap()].into()),
        tenants: Opening::Named(["t".parse().unwrap()].into()),
    };
    let vetting = Vetting {
        internal: vec![open("10.1.0.0/16"), open("169.254.0.0/16"), open("127.0.0.0/8")],
        own_ports: [9640].into(),
        ..Vetting::default()
    };
    let who = Who {
        pool: "p",
        tenant: "t",
    };
    let judge = |vetting: &Vetting, text: &str, port, who| {
        vetting
            .judge(&[ip("10.1.0.1"), ip("127.0.0.1")], ip(text), port, who)
            .refused
    };
    assert_eq!(judge(&vetting, "10.1.2.3", 443, who), None);
    assert_eq!(judge(&vetting, "64:ff9b::a01:203", 443, who), None);
    let special = Some(DoorReason::SpecialAddress);
    assert_eq!(judge(&vetting, "10.2.2.3", 443, who), special);
    assert_eq!(judge(&vetting, "10.1.2.3", 80, who), special);
    assert_eq!(
        judge(&vetting, "10.1.2.3", 443, Who { pool: "q", ..who }),
        special
    );
    assert_eq!(
        judge(&vetting, "10.1.2.3", 443, Who { tenant: "u", ..who }),
        special
    );
    assert_eq!(judge(&vetting, "127.0.0.2", 443, who), None);
    // Nothing opens what is the host's own.
    let own = Some(DoorReason::OwnAddress);
    assert_eq!(judge(&vetting, "10.1.0.1", 443, who), own);
    assert_eq!(judge(&vetting, "127.0.0.1", 443, who), own);
    assert_eq!(judge(&vetting, "127.0.0.2", 9640, who), own);
    // Metadata is opened by its own address alone.
    assert_eq!(judge(&vetting, "169.254.169.254", 443, who), special);
    let exact = Vetting {
        internal: vec![open("169.254.169.254/32")],
        ..Vetting::default()
    };
    assert_eq!(judge(&exact, "169.254.169.254", 443, who), None);
    assert_eq!(judge(&exact, "169.254.169.254", 80, who), special);
}

#[test]
fn one_bad_answer_refuses_the_name() {
    let vetting = Vetting::default();
    let good = [ip("8.8.8.8"), ip("2600::1")];
    assert_eq!(vetting.vet(&[], &good, 443, NOBODY).unwrap().len(), 2);
    for bad in ["127.0.0.1", "::1", "10.0.0.1"] {
        for at in 0..=good.len() {
            let mut mixed = good.to_vec();
            mixed.insert(at, ip(bad));
            let judged = vetting.vet(&[], &mixed, 443, NOBODY).unwrap_err();
            assert_eq!(judged.address, ip(bad));
        }
    }
}
