//! Placeholder.
#![expect(missing_docs, reason = "placeholder")]
#![expect(clippy::unused_async, reason = "placeholder")]
use crate::{gate::Permit, refusal::Refusal};
use sandbox_protocol::v1::{EnvVar, ExecIn, ExecOut, ExecStart};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
#[derive(Debug)]
pub struct RunConfig {
    pub cgroup_root: Option<PathBuf>,
    pub pid1: bool,
}
#[derive(Debug, thiserror::Error)]
#[error("run")]
pub struct RunError;
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClaimDefaults {
    pub env: Vec<EnvVar>,
    pub user: bytes::Bytes,
}
#[derive(Debug)]
pub struct ExecCtx {
    pub gate: Permit,
    pub base_env: Arc<[EnvVar]>,
    pub claim: Arc<ClaimDefaults>,
}
#[derive(Debug)]
pub struct HookOutcome {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub timed_out: bool,
    pub output: Vec<u8>,
}
#[derive(Debug, Clone)]
pub struct Runner;
pub type ExecStream =
    std::pin::Pin<Box<dyn futures_util::Stream<Item = Result<ExecOut, tonic::Status>> + Send>>;
impl Runner {
    pub fn start(config: RunConfig) -> Result<Self, RunError> {
        drop(config);
        Ok(Self)
    }
    pub async fn exec(
        &self,
        ctx: ExecCtx,
        _first: ExecStart,
        _input: tonic::Streaming<ExecIn>,
    ) -> Result<ExecStream, Refusal> {
        // Holds the permit for ever, as a program would.
        Ok(Box::pin(futures_util::stream::once(async move {
            let _ctx = ctx;
            std::future::pending().await
        })))
    }
    pub fn open(&self) -> Vec<String> {
        Vec::new()
    }
    pub async fn freeze(&self) -> Result<(), RunError> {
        Ok(())
    }
    pub async fn thaw(&self) -> Result<(), RunError> {
        Ok(())
    }
    pub fn forget_exited(&self) {}
    pub fn running(&self) -> u32 {
        0
    }
    pub async fn stop(&self, _grace: Duration) {}
    #[expect(clippy::disallowed_methods, reason = "placeholder")]
    pub async fn run_hook(
        &self,
        path: &Path,
        env: &[EnvVar],
        _timeout: Duration,
    ) -> Result<HookOutcome, RunError> {
        use std::os::unix::ffi::OsStrExt;
        let out = std::process::Command::new(path)
            .envs(env.iter().map(|v| {
                (
                    std::ffi::OsStr::from_bytes(&v.key),
                    std::ffi::OsStr::from_bytes(&v.value),
                )
            }))
            .output()
            .map_err(|_e| RunError)?;
        Ok(HookOutcome {
            code: out.status.code(),
            signal: None,
            timed_out: false,
            output: out.stdout,
        })
    }
}
