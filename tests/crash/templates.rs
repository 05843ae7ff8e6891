//! The daemon dies in the build of a template: afterwards there is a whole one or none, and nothing else of it.

use harness::{Daemon, Setup, within};
use sandbox_sdk::v1::{Lane, PoolKey, State, TemplatesBuildRequest};

use crate::{model::host_agrees, steps::LIMIT};

fn request(rebuild: bool) -> TemplatesBuildRequest {
    TemplatesBuildRequest {
        name: "second".into(),
        image: "busybox".into(),
        lane: Lane::None.into(),
        size: "small".into(),
        rebuild,
        ..TemplatesBuildRequest::default()
    }
}

async fn is_there(daemon: &Daemon) -> bool {
    let client = daemon.client().await;
    let templates = client.templates().list().await.unwrap();
    let second = templates.iter().find(|template| template.name == "second");
    let there = second.is_some_and(|second| !second.variants.is_empty());
    let folder = daemon.dir().join("templates/second/none-small");
    assert_eq!(there, folder.exists(), "the folder is the record");
    there
}

fn half_made(daemon: &Daemon) -> Vec<String> {
    let all = std::fs::read_dir(daemon.dir().join("templates")).unwrap();
    let names = all.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with('.')).collect()
}

#[tokio::test]
async fn c17_killed_at_every_step_of_a_build() {
    within(LIMIT, Box::pin(async {
        let mut daemon = Setup::dev().warm(0).start().await;
        let mut built = false;
        for (point, there_after) in [
            ("template.booted=kill@1", false),
            ("template.captured=kill@1", false),
            ("template.sealed=kill@1", false),
            ("template.checked=kill@1", false),
            ("template.put=kill@1", true),
            // Once more, over the one that is there: it stays, or the new one is in its place.
            ("template.checked=kill@1", true),
            ("template.put=kill@1", true),
        ] {
            daemon.kill9().await;
            daemon.change(|setup| setup.failpoints(point));
            daemon.start_again().await;
            let client = daemon.client().await;
            let mut build = client.templates().build(request(built)).await.unwrap();
            let process = daemon.process();
            tokio::select! {
                () = process.gone() => {}
                () = async { while let Some(Ok(_)) = build.next().await {} std::future::pending().await } => {}
            }
            daemon.ends().await;
            daemon.change(|setup| setup.failpoints(""));
            daemon.start_again().await;
            built = is_there(&daemon).await;
            assert_eq!(built, there_after, "{point}");
            assert_eq!(half_made(&daemon), Vec::<String>::new(), "{point}");
            host_agrees(&daemon).await;
        }
        let key = PoolKey {
            template: "second".into(),
            lane: Lane::None.into(),
            size: "small".into(),
        };
        let client = daemon.client().await;
        let sandbox = client.claim_key(key).await.unwrap();
        assert_eq!(sandbox.tier(), sandbox_sdk::v1::Tier::Clone);
        assert_eq!(sandbox.get().await.unwrap().state(), State::Claimed);
        sandbox.release().await.unwrap();
        host_agrees(&daemon).await;
    }))
    .await;
}

/// H2: what is in no record is ended at the start, also if that dies on the way.
#[tokio::test]
async fn h02_a_stray_is_ended_by_the_next_start() {
    within(
        LIMIT,
        Box::pin(async {
            let mut daemon = Setup::dev()
                .warm(0)
                .failpoints("template.booted=kill@1")
                .start()
                .await;
            let client = daemon.client().await;
            let build = client.templates().build(request(false)).await.unwrap();
            daemon.ends().await;
            drop(build);
            // The build's machine is in no record.
            assert_eq!(daemon.slot_dirs().len(), 1);
            daemon.change(|setup| setup.failpoints("recover.stray=kill@1"));
            let status = daemon.start_to_die().await;
            assert!(!status.success());
            assert_eq!(daemon.slot_dirs().len(), 1);
            daemon.change(|setup| setup.failpoints(""));
            daemon.start_again().await;
            host_agrees(&daemon).await;
        }),
    )
    .await;
}
