//! The results of `egress` as tables.

use serde_json::{Value, json};

use crate::report::{Held, arms, at_least, figures, held, line, machine, show, table};

const ARMS: [(&str, &str); 7] = [
    ("/arms/none/claim_us", "warm claim, no policy: doors that deny"),
    ("/arms/both_doors/claim_us", "warm claim, both doors armed"),
    ("/arms/guarded/claim_us", "warm claim, lane guarded"),
    (
        "/doors/tls/opaque_us",
        "TLS handshake with the origin, opaque tunnel",
    ),
    (
        "/doors/tls/kept_leaf_us",
        "TLS handshake looked into, leaf kept; the origin's within",
    ),
    ("/doors/tls/new_leaf_us", "the same, leaf issued"),
    ("/doors/tls/leaf_us", "leaf issue alone"),
];

const HELD: [Held; 10] = [
    held(
        "both doors armed / no policy, p50",
        ["/arms/both_doors/claim_us/p50", "/arms/none/claim_us/p50"],
        1.03,
    ),
    held(
        "guarded / no policy, p50",
        ["/arms/guarded/claim_us/p50", "/arms/none/claim_us/p50"],
        1.03,
    ),
    held("a refusal, p99 / 5 ms", ["/doors/denial_us/p99", "/5000"], 1.0),
    at_least(
        "GETs per CPU-second / best of tinyproxy, squid",
        ["/doors/door_http/get_per_cpu_s", "/best/get_per_cpu_s"],
        2.0,
    ),
    at_least(
        "GETs per second with the audit / without",
        [
            "/doors/door_http/get_per_s",
            "/doors/door_unaudited_http/get_per_s",
        ],
        0.95,
    ),
    held(
        "CONNECT set-up, p50 / best of tinyproxy, squid",
        ["/doors/door_http/dial_us/p50", "/best/http_dial_us"],
        1.0,
    ),
    at_least(
        "CONNECT set-ups per CPU-second / best of both",
        ["/doors/door_http/dials_per_cpu_s", "/best/http_dials_per_cpu_s"],
        1.0,
    ),
    held(
        "SOCKS5 set-up, p50 / best of dante, microsocks",
        ["/doors/door_socks5/dial_us/p50", "/best/socks5_dial_us"],
        1.0,
    ),
    at_least(
        "bytes per CPU-second through one tunnel / best of all four",
        [
            "/doors/door_http/one_tunnel_mib_per_cpu_s",
            "/best/one_tunnel_mib_per_cpu_s",
        ],
        1.0,
    ),
    at_least(
        "the same through 64",
        [
            "/doors/door_http/many_tunnels_mib_per_cpu_s",
            "/best/many_tunnels_mib_per_cpu_s",
        ],
        1.0,
    ),
];

const HTTP: [&str; 2] = ["tinyproxy_http", "squid_http"];
const SOCKS5: [&str; 2] = ["dante_socks5", "microsocks_socks5"];
const ALL: [&str; 4] = [
    "tinyproxy_http",
    "squid_http",
    "dante_socks5",
    "microsocks_socks5",
];

/// What the best of other proxies did.
fn best(results: &Value) -> Value {
    let of = |names: &[&str], at: &str, least: bool| {
        let numbers = names
            .iter()
            .filter_map(|name| results.pointer(&format!("/doors/{name}/{at}"))?.as_f64());
        numbers.reduce(if least { f64::min } else { f64::max })
    };
    json!({
        "get_per_cpu_s": of(&HTTP, "get_per_cpu_s", false),
        "http_dial_us": of(&HTTP, "dial_us/p50", true),
        "http_dials_per_cpu_s": of(&HTTP, "dials_per_cpu_s", false),
        "socks5_dial_us": of(&SOCKS5, "dial_us/p50", true),
        "one_tunnel_mib_per_cpu_s": of(&ALL, "one_tunnel_mib_per_cpu_s", false),
        "many_tunnels_mib_per_cpu_s": of(&ALL, "many_tunnels_mib_per_cpu_s", false),
    })
}

pub(crate) fn egress(results: &Value) -> String {
    let mut text = String::new();
    machine(&mut text, results);
    let mut all = results.clone();
    if let Some(all) = all.as_object_mut() {
        all.insert("best".to_owned(), best(results));
    }
    line(
        &mut text,
        "Engine stub, each guest a silkd process, every door bound. Sync mode: auto.",
    );
    arms(&mut text, &all, &ARMS);
    figures(&mut text, &all, &HELD);
    let get = |at: &str| all.pointer(at).map(show).unwrap_or_default();
    let head = ["work of one warm claim", "no policy", "both doors", "guarded"];
    table(&mut text, head, |add| {
        let counts = all.pointer("/arms/none/counts").and_then(Value::as_object);
        for kind in counts.into_iter().flatten().map(|(kind, _)| kind) {
            let of = |arm: &str| get(&format!("/arms/{arm}/counts/{kind}"));
            add([
                kind.replace('_', " "),
                of("none"),
                of("both_doors"),
                of("guarded"),
            ]);
        }
    });
    let head = [
        "proxy",
        "GET/s",
        "GET/CPU s",
        "GET p50 us",
        "GET p99 us",
        "dial p50 us",
        "dial p99 us",
        "dials/CPU s",
        "MiB/s",
        "MiB/CPU s",
        "MiB/s, 64",
        "MiB/CPU s, 64",
    ];
    table(&mut text, head, |add| {
        let rows = all.pointer("/doors").and_then(Value::as_object);
        for name in rows
            .into_iter()
            .flatten()
            .filter(|(_, row)| row.get("dial_us").is_some())
            .map(|(name, _)| name)
        {
            let of = |at: &str| get(&format!("/doors/{name}/{at}"));
            add([
                name.replace('_', " "),
                of("get_per_s"),
                of("get_per_cpu_s"),
                of("get_p50_us"),
                of("get_p99_us"),
                of("dial_us/p50"),
                of("dial_us/p99"),
                of("dials_per_cpu_s"),
                of("one_tunnel_mib_per_s"),
                of("one_tunnel_mib_per_cpu_s"),
                of("many_tunnels_mib_per_s"),
                of("many_tunnels_mib_per_cpu_s"),
            ]);
        }
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_of_others_is_what_we_are_held_to() {
        let row = |dial: f64, rate: f64| json!({ "dial_us": { "p50": dial }, "get_per_cpu_s": rate });
        let results = json!({ "doors": {
            "denial_us": { "p50": 1.0 },
            "tls": { "kept_leaf_us": { "p50": 404.0, "n": 1_000 } },
            "door_http": row(1.0, 9_000.0),
            "tinyproxy_http": row(300.0, 100.0),
            "squid_http": row(200.0, 50.0),
        }});
        let best = best(&results);
        assert_eq!(best["http_dial_us"], 200.0);
        assert_eq!(best["get_per_cpu_s"], 100.0);
        assert_eq!(best["socks5_dial_us"], Value::Null);
        let text = egress(&results);
        assert!(
            text.contains("| GETs per CPU-second / best of tinyproxy, squid | 90.00 | >= 2 | yes |"),
            "{text}"
        );
        let rows: Vec<_> = text.lines().filter(|line| line.starts_with("| t")).collect();
        assert_eq!(rows.len(), 1, "only proxies are rows of their table: {rows:?}");
        let kept = "| TLS handshake looked into, leaf kept; the origin's within | 1000 | 404.0 |";
        assert!(text.contains(kept), "{text}");
    }
}
