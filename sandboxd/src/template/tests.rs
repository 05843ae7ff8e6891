//! Whole builds over the fake engine.

use std::{collections::BTreeMap, time::Duration};

use super::*;
use crate::{
    claim::tests::rooms::{Rooms, key, size},
    engine::tests::fake::{Act, Op},
    image::Digest,
};

fn spec(name: &str, image: &str) -> Spec {
    Spec {
        name: name.parse().unwrap(),
        image: image.into(),
        warmup: vec![],
        warmup_timeout: Duration::from_secs(1),
    }
}

/// As the rooms have it.
fn default() -> Spec {
    spec("default", "none")
}

fn sizes() -> BTreeMap<Name, Size> {
    BTreeMap::from([(key().size, size())])
}

fn file(specs: impl IntoIterator<Item = Spec>) -> BTreeMap<Name, Spec> {
    specs.into_iter().map(|spec| (spec.name.clone(), spec)).collect()
}

fn of(template: &str) -> PoolKey {
    PoolKey {
        template: template.parse().unwrap(),
        ..key()
    }
}

#[tokio::test]
async fn who_wants_a_build_that_was_cancelled_gets_one_of_his_own() {
    let rooms = Rooms::new();
    let (templates, engine) = (&rooms.claims.templates, &rooms.engine);
    engine.set(Op::Boot, Some(Act::Hang));
    engine.set(Op::Reap, Some(Act::Fail));
    let first = templates.build(default(), key(), true).unwrap();
    engine.until_begun(Op::Boot, 1).await;
    drop(first);
    engine.until_begun(Op::Reap, 1).await;
    assert!(templates.is_building(&key()), "it still gives back what it holds");

    engine.set(Op::Boot, None);
    let second = templates.build(default(), key(), true).unwrap();
    engine.set(Op::Reap, None);
    let capture = second.done().await.unwrap();
    assert_eq!(templates.current(&key()).unwrap().digest(), capture.digest());
    assert!(!templates.is_building(&key()));
}

#[tokio::test]
async fn a_build_is_shared_by_those_who_want_the_same() {
    let rooms = Rooms::new();
    let (templates, engine) = (&rooms.claims.templates, &rooms.engine);
    engine.set(Op::Boot, Some(Act::Hang));
    let other = templates.build(spec("py", "other"), of("py"), true).unwrap();
    let same = Spec {
        warmup_timeout: Duration::from_secs(7),
        ..spec("py", "other")
    };
    let joined = templates.build(same, of("py"), true).unwrap();
    let refused = templates.build(spec("py", "another"), of("py"), true);
    assert!(matches!(refused, Err(TemplateError::Building(_))), "{refused:?}");
    let refused = templates.delete(&of("py").template).err();
    assert!(matches!(refused, Some(TemplateError::Building(_))), "{refused:?}");
    drop(other);
    engine.until_begun(Op::Boot, 1).await;
    assert!(!joined.is_cancelled(), "one who wants it is left");
    drop(joined);
}

#[tokio::test]
async fn a_pool_waits_for_a_build_from_something_else_and_then_has_its_own() {
    let rooms = Rooms::new();
    let (templates, engine) = (&rooms.claims.templates, &rooms.engine);
    engine.set(Op::Boot, Some(Act::Hang));
    let other = templates.build(spec("default", "other"), key(), true).unwrap();
    engine.until_begun(Op::Boot, 1).await;
    let wanted = key();
    let (ensured, ()) = tokio::join!(templates.ensure(&wanted), async {
        engine.set(Op::Boot, None);
        drop(other);
    });
    ensured.unwrap();
    assert_eq!(engine.begun(Op::Boot), 2);
    assert_eq!(templates.spec(&key().template), Some(default()));
}

#[tokio::test]
async fn a_spoiled_capture_stays_out_of_use_until_it_is_built_anew() {
    let rooms = Rooms::new();
    let templates = &rooms.claims.templates;
    let capture = templates.ensure(&key()).await.unwrap();
    templates.spoil(&key(), Digest::of(b"another"), "not this one".into());
    assert!(templates.current(&key()).is_some());
    templates.spoil(&key(), capture.digest(), "torn".into());
    assert!(templates.current(&key()).is_none());
    templates.set(file([default()]), sizes());
    assert!(
        templates.current(&key()).is_none(),
        "a judgement does not mend it"
    );
    let (_, variants) = &templates.list()[0];
    assert_eq!(variants[0].1.stale(), Some("torn"));
    let anew = templates.ensure(&key()).await.unwrap();
    assert_ne!(anew.digest(), capture.digest());
    assert!(templates.current(&key()).is_some());
}

#[tokio::test]
async fn the_file_takes_its_templates_along_but_for_those_that_are_built() {
    let rooms = Rooms::new();
    let templates = &rooms.claims.templates;
    let built = Spec {
        warmup_timeout: Duration::from_secs(5),
        ..default()
    };
    templates.set(file([built, spec("never", "none")]), sizes());
    templates.ensure(&key()).await.unwrap();
    let refused = templates.delete(&key().template).err();
    assert!(matches!(refused, Some(TemplateError::FromFile(_))), "{refused:?}");

    templates.set(BTreeMap::new(), sizes());
    assert!(!templates.knows(&of("never").template));
    let left = templates.spec(&key().template).unwrap();
    assert_eq!(
        left.warmup_timeout,
        Duration::from_secs(30),
        "as its capture says"
    );
    assert!(!templates.is_of_file(&key().template));

    // A size that means something else makes it stale, and its own again fresh.
    assert!(templates.current(&key()).is_some());
    let larger = Size {
        memory: crate::words::MemBytes::from_mib(512),
        ..size()
    };
    templates.set(BTreeMap::new(), BTreeMap::from([(key().size, larger)]));
    assert!(templates.current(&key()).is_none());
    templates.set(BTreeMap::new(), sizes());
    assert!(templates.current(&key()).is_some());

    templates.delete(&key().template).unwrap().await.unwrap();
    assert!(!templates.knows(&key().template));
    assert!(templates.current(&key()).is_none());
    assert!(!rooms.dir.path().join("templates/default").exists());
    let again = templates.delete(&key().template).err();
    assert!(matches!(again, Some(TemplateError::NotFound(_))), "{again:?}");
    let unknown = templates.ensure(&key()).await;
    assert!(matches!(unknown, Err(TemplateError::NotFound(_))), "{unknown:?}");
}

#[tokio::test]
async fn a_build_that_panics_fails_and_leaves_nothing() {
    let rooms = Rooms::new();
    let (templates, engine) = (&rooms.claims.templates, &rooms.engine);
    engine.set(Op::Boot, Some(Act::Panic));
    let failed = templates.ensure(&key()).await.unwrap_err();
    assert_eq!(failed.reason(), sandbox_protocol::reason::Reason::TemplateFailed);
    assert!(!templates.is_building(&key()));
    assert_eq!(
        std::fs::read_dir(rooms.dir.path().join("templates"))
            .unwrap()
            .count(),
        0
    );

    // Not even the teardown's own panic leaves an entry that nobody takes away.
    engine.set(Op::Reap, Some(Act::Panic));
    let failed = templates.ensure(&key()).await.unwrap_err();
    assert!(failed.chain().contains("broke off"), "{failed}");
    assert!(!templates.is_building(&key()));
    engine.set(Op::Reap, None);
    engine.set(Op::Boot, None);
    templates.ensure(&key()).await.unwrap();
}

#[tokio::test]
async fn a_stop_ends_builds_and_lets_no_other_begin() {
    let rooms = Rooms::new();
    let (templates, engine) = (&rooms.claims.templates, &rooms.engine);
    engine.set(Op::Boot, Some(Act::Hang));
    let build = templates.build(default(), key(), true).unwrap();
    engine.until_begun(Op::Boot, 1).await;
    templates.stop().await;
    let ended = build.done().await;
    assert!(
        matches!(&ended, Err(TemplateError::Shared(why)) if matches!(**why, TemplateError::Cancelled)),
        "{ended:?}"
    );
    let late = templates.build(default(), key(), true);
    assert!(matches!(late, Err(TemplateError::Cancelled)), "{late:?}");
}
