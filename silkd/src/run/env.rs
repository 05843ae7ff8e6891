//! The one builder of environments: base < image < claim < request. Pure.

use std::collections::HashMap;

use bytes::Bytes;
use sandbox_protocol::{limits::ARG_STRING, reason::Reason, v1::EnvVar};

use super::{strings::Strings, users::User};
use crate::refusal::{Escaped, Refusal};

/// Where programs are looked for when nobody says otherwise.
pub(super) const PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The environment of a program, later layers over earlier ones; of a key that a layer has twice, the last counts.
/// `clear` leaves the last layer alone.
///
/// # Errors
/// `INVALID_ENV` for a key that is empty or holds `=` or NUL, or a value that holds NUL; `ARGUMENTS_TOO_LARGE` for a
/// string beyond [`ARG_STRING`].
pub(super) fn build(user: &User, layers: &[&[EnvVar]], clear: bool) -> Result<Built, Refusal> {
    let base = [
        var(b"PATH", PATH),
        var(b"HOME", &user.home),
        var(b"USER", &user.name),
        var(b"LOGNAME", &user.name),
        var(b"SHELL", &user.shell),
        var(b"LANG", b"C.UTF-8"),
    ];
    let last = layers.last().copied().into_iter();
    let all = std::iter::once(&base[..]).chain(layers.iter().copied());
    let chosen: Vec<&[EnvVar]> = if clear { last.collect() } else { all.collect() };
    let mut order: Vec<&EnvVar> = Vec::new();
    let mut places: HashMap<&[u8], usize> = HashMap::new();
    for variable in chosen.into_iter().flatten() {
        check(variable)?;
        match places.get(&*variable.key).and_then(|place| order.get_mut(*place)) {
            Some(place) => *place = variable,
            None => {
                places.insert(&variable.key, order.len());
                order.push(variable);
            }
        }
    }
    let path = order.iter().find(|variable| variable.key == b"PATH"[..]);
    let path = path.map_or(Bytes::from_static(PATH), |variable| variable.value.clone());
    let mut env = Strings::default();
    for variable in order {
        env.push(&[&variable.key, b"=", &variable.value])
            .map_err(|_checked| invalid("a value holds NUL", variable))?;
    }
    Ok(Built { env, path })
}

/// What [`build`] makes.
#[derive(Debug)]
pub(super) struct Built {
    pub(super) env: Strings,
    /// Its PATH, or the default one where it has none.
    pub(super) path: Bytes,
}

fn var(key: &'static [u8], value: &[u8]) -> EnvVar {
    EnvVar {
        key: Bytes::from_static(key),
        value: Bytes::copy_from_slice(value),
    }
}

fn check(variable: &EnvVar) -> Result<(), Refusal> {
    let size = variable
        .key
        .len()
        .saturating_add(variable.value.len())
        .saturating_add(1);
    if variable.key.is_empty() {
        return Err(invalid("a key is empty", variable));
    }
    if variable.key.iter().any(|byte| matches!(byte, b'=' | 0)) {
        return Err(invalid("a key holds `=` or NUL", variable));
    }
    if variable.value.contains(&0) {
        return Err(invalid("a value holds NUL", variable));
    }
    if size > ARG_STRING {
        let message = format!("the variable `{}` takes {size} bytes", Escaped(&variable.key, 64));
        return Err(Refusal::new(Reason::ArgumentsTooLarge, message));
    }
    Ok(())
}

fn invalid(what: &str, variable: &EnvVar) -> Refusal {
    Refusal::new(
        Reason::InvalidEnv,
        format!("{what}: `{}`", Escaped(&variable.key, 64)),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::run::users;

    fn root() -> User {
        users::own(0, b"root:x:0:0::/root:/bin/bash\n")
    }

    fn pairs(list: &[(&[u8], &[u8])]) -> Vec<EnvVar> {
        let own = |text: &[u8]| Bytes::copy_from_slice(text);
        list.iter()
            .map(|(key, value)| EnvVar {
                key: own(key),
                value: own(value),
            })
            .collect()
    }

    fn texts(built: &Built) -> Vec<Vec<u8>> {
        built.env.iter().map(|text| text.to_bytes().to_vec()).collect()
    }

    #[test]
    fn later_layers_win_and_clear_starts_from_the_request() {
        let image = pairs(&[(b"A", b"image"), (b"LANG", b"C")]);
        let claim = pairs(&[(b"A", b"claim"), (b"B", b"claim")]);
        let request = pairs(&[(b"B", b"1"), (b"B", b"2"), (b"PATH", b"/x")]);
        let built = build(&root(), &[&image, &claim, &request], false).unwrap();
        let expected: [&[u8]; 8] = [
            b"PATH=/x",
            b"HOME=/root",
            b"USER=root",
            b"LOGNAME=root",
            b"SHELL=/bin/bash",
            b"LANG=C",
            b"A=claim",
            b"B=2",
        ];
        assert_eq!(texts(&built), expected);
        assert_eq!(built.path, b"/x"[..]);
        let built = build(&root(), &[&image, &claim, &request], true).unwrap();
        assert_eq!(texts(&built), [&b"B=2"[..], b"PATH=/x"]);
        let built = build(&root(), &[&image, &[]], true).unwrap();
        assert_eq!((texts(&built).len(), &*built.path), (0, PATH));
    }

    #[test]
    fn bad_env_key_refused() {
        for key in [&b""[..], b"a=b", b"=", b"a\0"] {
            let refusal = build(&root(), &[&pairs(&[(key, b"v")])], false).unwrap_err();
            assert_eq!(refusal.reason, Reason::InvalidEnv, "{key:?}");
        }
        let refusal = build(&root(), &[&pairs(&[(b"k", b"a\0b")])], false).unwrap_err();
        assert_eq!(refusal.reason, Reason::InvalidEnv);
        let long = vec![b'x'; ARG_STRING];
        let refusal = build(&root(), &[&pairs(&[(b"k", &long)])], false).unwrap_err();
        assert_eq!(refusal.reason, Reason::ArgumentsTooLarge);
    }

    proptest! {
        #[test]
        fn like_a_map_written_layer_by_layer(layers in proptest::collection::vec(proptest::collection::vec(("[a-d]{1,2}", "[x-z=\n]{0,3}"), 0..6), 1..4)) {
            let layers: Vec<Vec<EnvVar>> = layers
                .iter()
                .map(|layer| layer.iter().map(|(k, v)| EnvVar { key: k.clone().into(), value: v.clone().into() }).collect())
                .collect();
            let slices: Vec<&[EnvVar]> = layers.iter().map(Vec::as_slice).collect();
            let mut model = BTreeMap::new();
            for variable in layers.iter().flatten() {
                model.insert(variable.key.clone(), variable.value.clone());
            }
            let built = build(&root(), &slices, false).unwrap();
            let mut got: Vec<Vec<u8>> = texts(&built).into_iter().filter(|text| text[0].is_ascii_lowercase()).collect();
            got.sort();
            let mut expected: Vec<Vec<u8>> = model.iter().map(|(k, v)| [k, &b"="[..], v].concat()).collect();
            expected.sort();
            prop_assert_eq!(got, expected);
        }
    }
}
