//! Pools and templates.

use harness::{Setup, refused};
use sandbox_sdk::{
    Reason,
    v1::{
        Lane, PoolKey, PoolSpec, Source, State, TemplatesBuildRequest, build_step::Kind, pools_watch_reply,
        templates_build_reply,
    },
};

fn spec(name: &str, warm: u32) -> PoolSpec {
    PoolSpec {
        name: name.to_owned(),
        key: Some(PoolKey {
            template: "default".to_owned(),
            ..PoolKey::default()
        }),
        warm,
        ..PoolSpec::default()
    }
}

fn build(name: &str) -> TemplatesBuildRequest {
    TemplatesBuildRequest {
        name: name.to_owned(),
        image: "busybox".to_owned(),
        ..TemplatesBuildRequest::default()
    }
}

#[tokio::test]
async fn c15_a_pool_that_was_applied_is_there_after_a_crash_and_one_that_was_deleted_is_not() {
    let mut daemon = Setup::stub().warm(0).start().await;
    let client = daemon.client().await;
    let pool = client.pools().apply(spec("web", 2)).await.unwrap();
    let made = pool.spec.clone().unwrap();
    assert_eq!(pool.source(), Source::Applied);
    assert_eq!(
        (made.warm, made.warm_max, made.lease_secs, made.lease_max_secs),
        (2, Some(4), Some(3600), Some(86_400))
    );
    client.pools().apply(spec("gone", 0)).await.unwrap();
    client.pools().delete("gone").await.unwrap();
    daemon
        .until_pool("web", |pool| pool.warm == 2 && pool.making == 0)
        .await;
    let before = daemon.sandbox_processes();
    let changed = PoolSpec {
        lease_secs: Some(60),
        ..spec("web", 2)
    };
    client.pools().apply(changed).await.unwrap();

    daemon.kill9().await;
    daemon.start_again().await;
    let pool = daemon
        .until_pool("web", |pool| pool.warm == 2 && pool.making == 0)
        .await;
    assert_eq!(pool.spec.unwrap().lease_secs, Some(60));
    assert_eq!(daemon.sandbox_processes(), before, "its stock was taken up");
    let client = daemon.client().await;
    let names: Vec<String> = client
        .pools()
        .list()
        .await
        .unwrap()
        .into_iter()
        .map(|pool| pool.spec.unwrap().name)
        .collect();
    assert_eq!(names, ["default", "web"]);

    // Deleting ends the stock, and claims live on.
    let claim = client.claim("web").await.unwrap();
    let mut watch = client.pools().watch(vec!["web".to_owned()]).await.unwrap();
    client.pools().delete("web").await.unwrap();
    loop {
        match watch.next().await.unwrap().unwrap().event {
            Some(pools_watch_reply::Event::Deleted(name)) => break assert_eq!(name, "web"),
            Some(pools_watch_reply::Event::Pool(_) | pools_watch_reply::Event::Synced(_)) | None => {}
        }
    }
    daemon
        .until_rows(|rows| {
            let alive = rows
                .values()
                .filter(|row| !matches!(row.state(), State::Gone))
                .count();
            alive == 1
        })
        .await;
    assert!(claim.exec(["true"]).output().await.unwrap().status.success());
    assert_eq!(daemon.slot_dirs().len(), 1);
    refused(client.pools().delete("web").await, Reason::PoolNotFound);
    refused(client.claim("web").await, Reason::PoolNotFound);
}

#[tokio::test]
async fn a_pool_of_the_file_and_a_wrong_pool_are_refused_by_name() {
    let daemon = Setup::stub().in_process().warm(1).start().await;
    let client = daemon.client().await;
    refused(
        client.pools().apply(spec("default", 2)).await,
        Reason::PoolFromFile,
    );
    refused(client.pools().delete("default").await, Reason::PoolFromFile);
    let key = |template: &str, size: &str, lane: Lane| {
        Some(PoolKey {
            template: template.to_owned(),
            size: size.to_owned(),
            lane: lane.into(),
        })
    };
    let table = [
        (
            PoolSpec {
                key: key("none", "", Lane::None),
                ..spec("p", 1)
            },
            Reason::TemplateNotFound,
            "",
        ),
        (
            PoolSpec {
                key: key("default", "huge", Lane::None),
                ..spec("p", 1)
            },
            Reason::SizeNotFound,
            "",
        ),
        (
            PoolSpec {
                key: key("default", "", Lane::Guarded),
                ..spec("p", 1)
            },
            Reason::LaneUnavailable,
            "",
        ),
        (
            PoolSpec {
                key: None,
                ..spec("p", 1)
            },
            Reason::FieldInvalid,
            "spec.key",
        ),
        (spec("Bad Name", 1), Reason::FieldInvalid, "spec.name"),
        (spec("p", 4097), Reason::FieldInvalid, "spec.warm"),
        (
            PoolSpec {
                warm_max: Some(1),
                ..spec("p", 2)
            },
            Reason::FieldInvalid,
            "spec.warm_max",
        ),
        (
            PoolSpec {
                lease_secs: Some(0),
                ..spec("p", 1)
            },
            Reason::FieldInvalid,
            "spec.lease_secs",
        ),
        (
            PoolSpec {
                lease_max_secs: Some(31 * 86_400),
                ..spec("p", 1)
            },
            Reason::FieldInvalid,
            "spec.lease_max_secs",
        ),
    ];
    for (wrong, reason, field) in table {
        let error = refused(client.pools().apply(wrong.clone()).await, reason);
        let named: Vec<&str> = error.fields().iter().map(|field| field.field.as_str()).collect();
        let expected: Vec<&str> = Some(field)
            .filter(|field| !field.is_empty())
            .into_iter()
            .collect();
        assert_eq!(named, expected, "{wrong:?}");
    }
    assert_eq!(client.pools().list().await.unwrap().len(), 1);
}

#[tokio::test]
async fn templates_are_built_in_steps_listed_and_deleted_when_nobody_uses_them() {
    let daemon = Setup::stub().warm(0).start().await;
    let client = daemon.client().await;
    let templates = client.templates();
    let mut steps = Vec::new();
    let wanted = TemplatesBuildRequest {
        warmup: vec!["true".into()],
        ..build("py")
    };
    let built = templates
        .build(wanted)
        .await
        .unwrap()
        .finish(|step| steps.push(step.kind()))
        .await
        .unwrap();
    assert_eq!(
        steps,
        [
            Kind::Boot,
            Kind::Agent,
            Kind::Warmup,
            Kind::Quiesce,
            Kind::Capture,
            Kind::Check
        ]
    );
    assert_eq!((built.name.as_str(), built.image.as_str()), ("py", "busybox"));
    assert_eq!(built.warmup, [b"true".as_slice()]);
    let variant = &built.variants[0];
    assert_eq!(
        (variant.size.as_str(), variant.lane(), variant.stale.as_str()),
        ("small", Lane::None, "")
    );
    assert_eq!(templates.get("py").await.unwrap(), built);
    let names: Vec<String> = templates
        .list()
        .await
        .unwrap()
        .into_iter()
        .map(|template| template.name)
        .collect();
    assert_eq!(names, ["default", "py"], "the file's, and the one just built");

    let again = templates.build(build("py")).await;
    match again {
        Err(error) => drop(refused::<()>(Err(error), Reason::TemplateExists)),
        Ok(build) => drop(refused(build.finish(|_| {}).await, Reason::TemplateExists)),
    }
    let rebuild = TemplatesBuildRequest {
        rebuild: true,
        ..build("py")
    };
    let rebuilt = templates
        .build(rebuild)
        .await
        .unwrap()
        .finish(|_| {})
        .await
        .unwrap();
    assert_eq!(rebuilt.variants.len(), 1);
    assert_ne!(rebuilt.variants[0].created_at, variant.created_at);

    let key = PoolKey {
        template: "py".to_owned(),
        ..PoolKey::default()
    };
    let claim = client.claim_key(key.clone()).await.unwrap();
    let error = refused(templates.delete("py").await, Reason::TemplateInUse);
    assert!(error.message().contains(claim.id()), "{error:?}");
    claim.release().await.unwrap();
    daemon
        .until_rows(|rows| rows.values().all(|row| row.state() == State::Gone))
        .await;
    client
        .pools()
        .apply(PoolSpec {
            key: Some(key),
            ..spec("snakes", 0)
        })
        .await
        .unwrap();
    let error = refused(templates.delete("py").await, Reason::TemplateInUse);
    assert!(error.message().contains("snakes"), "{error:?}");
    client.pools().delete("snakes").await.unwrap();
    templates.delete("py").await.unwrap();
    refused(templates.get("py").await, Reason::TemplateNotFound);
    refused(templates.delete("py").await, Reason::TemplateNotFound);
    assert!(!daemon.dir().join("templates/py").exists());
}

#[tokio::test]
async fn wrong_builds_are_refused_and_a_warm_up_that_fails_says_what_it_said() {
    let daemon = Setup::stub().warm(0).start().await;
    let client = daemon.client().await;
    let templates = client.templates();
    for (wrong, reason) in [
        (build("Bad Name"), Reason::FieldInvalid),
        (
            TemplatesBuildRequest {
                image: String::new(),
                ..build("new")
            },
            Reason::FieldInvalid,
        ),
        (
            TemplatesBuildRequest {
                image: "../x".to_owned(),
                ..build("new")
            },
            Reason::FieldInvalid,
        ),
        (
            TemplatesBuildRequest {
                size: "huge".to_owned(),
                ..build("new")
            },
            Reason::SizeNotFound,
        ),
        (
            TemplatesBuildRequest {
                lane: Lane::Guarded.into(),
                ..build("new")
            },
            Reason::LaneUnavailable,
        ),
        (
            TemplatesBuildRequest {
                warmup_timeout_ms: Some(600_001),
                ..build("new")
            },
            Reason::FieldInvalid,
        ),
        (
            TemplatesBuildRequest {
                warmup: vec!["a\0b".into()],
                ..build("new")
            },
            Reason::FieldInvalid,
        ),
    ] {
        refused(templates.build(wrong).await, reason);
    }
    let script = "echo on stdout; echo no luck >&2; exit 9";
    let failing = TemplatesBuildRequest {
        warmup: ["sh", "-c", script].map(Into::into).to_vec(),
        ..build("new")
    };
    let error = refused(
        templates.build(failing).await.unwrap().finish(|_| {}).await,
        Reason::TemplateFailed,
    );
    assert!(
        error.message().contains('9') && error.message().contains("no luck"),
        "{error:?}"
    );
    let slow = TemplatesBuildRequest {
        warmup: ["sleep", "1000"].map(Into::into).to_vec(),
        warmup_timeout_ms: Some(100),
        ..build("new")
    };
    refused(
        templates.build(slow).await.unwrap().finish(|_| {}).await,
        Reason::TemplateFailed,
    );
    refused(templates.get("new").await, Reason::TemplateNotFound);
    assert_eq!(daemon.slot_dirs(), [] as [String; 0]);
    assert_eq!(daemon.sandbox_processes(), []);
}

#[tokio::test]
async fn h01_a_build_that_is_cancelled_leaves_nothing() {
    let daemon = Setup::stub().warm(0).start().await;
    let client = daemon.client().await;
    let slow = TemplatesBuildRequest {
        warmup: ["sleep", "1000"].map(Into::into).to_vec(),
        ..build("slow")
    };
    let mut running = client.templates().build(slow).await.unwrap();
    loop {
        let event = running.next().await.unwrap().unwrap().event;
        if let Some(templates_build_reply::Event::Step(step)) = event
            && step.kind() == Kind::Agent
        {
            break;
        }
    }
    let booted = daemon.sandbox_processes();
    assert_eq!(booted.len(), 1);
    drop(running);
    booted[0].gone().await;
    harness::eventually("nothing is left of the build", || async {
        let templates = std::fs::read_dir(daemon.dir().join("templates")).unwrap().count();
        (daemon.slot_dirs().is_empty() && templates == 0).then_some(())
    })
    .await;
    refused(client.templates().get("slow").await, Reason::TemplateNotFound);
}

#[tokio::test]
async fn sandboxctl_looks_after_pools_and_templates() {
    let daemon = Setup::stub().warm(1).start().await;
    daemon.until_warm(1).await;
    let ctl = daemon.ctl();
    let built = ctl.json(["template", "build", "py", "--warmup", "true"]).await;
    assert_eq!(
        (&built["name"], &built["variants"][0]["size"]),
        (&"py".into(), &"small".into())
    );
    assert_eq!(ctl.json(["template", "inspect", "py"]).await, built);
    let pool = ctl
        .json([
            "pool",
            "apply",
            "snakes",
            "--template",
            "py",
            "--warm",
            "2",
            "--lease",
            "10m",
        ])
        .await;
    assert_eq!(
        (&pool["spec"]["name"], &pool["spec"]["lease_secs"]),
        (&"snakes".into(), &600.into())
    );
    let ready = ctl.json(["wait-ready", "--pool", "snakes", "--warm", "2"]).await;
    assert_eq!((&ready["pool"], &ready["warm"]), (&"snakes".into(), &2.into()));
    assert_eq!(
        ctl.json(["pool", "list"]).await["pools"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    assert_eq!(
        ctl.error(["template", "rm", "py"]).await["reason"],
        "TEMPLATE_IN_USE"
    );
    assert_eq!(ctl.json(["pool", "rm", "snakes"]).await, serde_json::json!({}));
    daemon
        .until_rows(|rows| rows.values().filter(|row| row.state() != State::Gone).count() == 1)
        .await;
    assert_eq!(ctl.json(["template", "rm", "py"]).await, serde_json::json!({}));
    assert_eq!(
        ctl.json(["template", "list"]).await["templates"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    assert_eq!(
        ctl.error(["pool", "apply", "default"]).await["reason"],
        "POOL_FROM_FILE"
    );
    let vain = ctl
        .run(["wait-ready", "--pool", "absent", "--timeout", "100ms"])
        .await;
    assert_eq!(vain.code, 3, "{}", vain.stderr);
}
