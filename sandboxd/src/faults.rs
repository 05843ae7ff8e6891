//! Failpoints for the crash tests. Without the cargo feature `faults` every one of them is nothing at all, and the
//! shipped daemon is built without it.
//!
//! `SANDBOXD_FAULTS=name=action[,..]` arms them, where an action is `kill` (SIGKILL to the daemon at that place), `kill@N`
//! (at the N-th passage), `error` or `error@N` (the operation at that place fails with EIO).
//!
//! May call: nothing.
//! Never inside: a delay.

/// A place where a test may end the daemon or make the operation fail.
///
/// # Errors
/// Only with the feature `faults`, where the environment armed this name with `error`.
#[cfg(not(feature = "faults"))]
#[inline]
pub fn point(_name: &'static str) -> std::io::Result<()> {
    Ok(())
}

/// A place where a test may end the daemon, in code that nothing can fail in: an armed `error` does nothing here.
#[inline]
pub fn passage(name: &'static str) {
    // Only `kill` has a meaning here.
    drop(point(name));
}

#[cfg(feature = "faults")]
pub use armed::point;

#[cfg(feature = "faults")]
mod armed {
    use std::{
        collections::HashMap,
        io,
        sync::{
            LazyLock,
            atomic::{AtomicU64, Ordering},
        },
    };

    #[derive(Debug, Clone, Copy)]
    enum Action {
        Kill,
        Error,
    }

    #[derive(Debug)]
    struct Armed {
        action: Action,
        /// 0: every passage.
        at: u64,
        passed: AtomicU64,
    }

    static ARMED: LazyLock<HashMap<String, Armed>> = LazyLock::new(|| {
        #[expect(
            clippy::disallowed_methods,
            reason = "a test arms its daemon through the environment"
        )]
        let text = std::env::var("SANDBOXD_FAULTS").unwrap_or_default();
        text.split(',').filter_map(parse).collect()
    });

    fn parse(item: &str) -> Option<(String, Armed)> {
        let (name, action) = item.split_once('=')?;
        let (action, at) = action.split_once('@').unwrap_or((action, "0"));
        let action = match action {
            "kill" => Action::Kill,
            "error" => Action::Error,
            _ => return None,
        };
        Some((
            name.to_owned(),
            Armed {
                action,
                at: at.parse().ok()?,
                passed: AtomicU64::new(0),
            },
        ))
    }

    /// A place where a test may end the daemon or make the operation fail.
    ///
    /// # Errors
    /// EIO where the environment armed this name with `error`.
    pub fn point(name: &'static str) -> io::Result<()> {
        let Some(armed) = ARMED.get(name) else {
            return Ok(());
        };
        let passage = armed.passed.fetch_add(1, Ordering::Relaxed) + 1;
        if armed.at != 0 && armed.at != passage {
            return Ok(());
        }
        match armed.action {
            Action::Error => Err(io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error())),
            Action::Kill => {
                let me = rustix::process::getpid();
                rustix::process::kill_process(me, rustix::process::Signal::KILL)?;
                // SIGKILL to oneself is delivered before the call returns.
                Ok(())
            }
        }
    }
}
