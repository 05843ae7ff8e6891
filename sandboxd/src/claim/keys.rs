//! Request keys: a repeated request is the same request, for as long as its claim's row is kept.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sandbox_protocol::id::SandboxId;
use tokio::sync::watch;

/// Owner and key.
type Key = (Arc<str>, Arc<str>);

/// All request keys in use.
#[derive(Debug, Clone, Default)]
pub struct Keys(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<Key, Entry>,
    /// Entries at which those of forgotten sandboxes are looked for again.
    sweep_at: usize,
}

#[derive(Debug)]
enum Entry {
    /// The first request is under way; the channel closes when it is through.
    Pending {
        digest: Arc<str>,
        through: watch::Receiver<()>,
    },
    Done {
        digest: Arc<str>,
        sandbox: SandboxId,
    },
}

/// What a request with a key is.
#[derive(Debug)]
pub enum Reserved {
    /// The first with this key. Fulfil the guard, or drop it to free the key.
    New(KeyGuard),
    /// A repetition: this was its sandbox.
    Same(SandboxId),
    /// A repetition while the first is under way: wait until the channel closes, then ask again.
    Wait(watch::Receiver<()>),
    /// Another request used this key.
    Other,
}

/// Holds a key while its request is under way.
#[derive(Debug)]
pub struct KeyGuard {
    keys: Keys,
    key: Option<(Key, Arc<str>)>,
    _through: watch::Sender<()>,
}

/// Entries below which no sweep is worth it.
const SWEEP_FLOOR: usize = 1024;

impl Keys {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks a key up and reserves it if it is free. `known` tells whether the row of a sandbox is still kept.
    pub fn reserve(
        &self,
        owner: &Arc<str>,
        key: &str,
        digest: &str,
        known: impl Fn(SandboxId) -> bool,
    ) -> Reserved {
        let key: Key = (Arc::clone(owner), key.into());
        let mut table = self.lock();
        match table.entries.get(&key) {
            Some(Entry::Pending { digest: other, .. } | Entry::Done { digest: other, .. })
                if **other != *digest =>
            {
                return Reserved::Other;
            }
            Some(Entry::Pending { through, .. }) => return Reserved::Wait(through.clone()),
            Some(Entry::Done { sandbox, .. }) if known(*sandbox) => return Reserved::Same(*sandbox),
            Some(Entry::Done { .. }) | None => {}
        }
        if table.entries.len() >= table.sweep_at.max(SWEEP_FLOOR) {
            table.entries.retain(|_, entry| match entry {
                Entry::Pending { .. } => true,
                Entry::Done { sandbox, .. } => known(*sandbox),
            });
            table.sweep_at = table.entries.len() * 2;
        }
        let (sender, through) = watch::channel(());
        let digest: Arc<str> = digest.into();
        table.entries.insert(
            key.clone(),
            Entry::Pending {
                digest: Arc::clone(&digest),
                through,
            },
        );
        Reserved::New(KeyGuard {
            keys: self.clone(),
            key: Some((key, digest)),
            _through: sender,
        })
    }

    /// Puts in a key that a restarted daemon found in its records.
    pub fn restore(&self, owner: &Arc<str>, key: &str, digest: &str, sandbox: SandboxId) {
        let entry = Entry::Done {
            digest: digest.into(),
            sandbox,
        };
        self.lock().entries.insert((Arc::clone(owner), key.into()), entry);
    }

    /// Keys that are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().entries.len()
    }

    /// Whether none is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl KeyGuard {
    /// The request is through, and this is its sandbox.
    pub fn fulfil(mut self, sandbox: SandboxId) {
        if let Some((key, digest)) = self.key.take() {
            self.keys
                .lock()
                .entries
                .insert(key, Entry::Done { digest, sandbox });
        }
    }
}

impl Drop for KeyGuard {
    fn drop(&mut self) {
        if let Some((key, _)) = self.key.take() {
            self.keys.lock().entries.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u8) -> SandboxId {
        SandboxId::from_random([n; 16])
    }

    #[tokio::test]
    async fn a_repetition_is_the_same_request() {
        let (keys, me) = (Keys::default(), Arc::<str>::from("operator"));
        let Reserved::New(guard) = keys.reserve(&me, "k", "d", |_| true) else {
            unreachable!("the key is free")
        };
        let Reserved::Wait(mut through) = keys.reserve(&me, "k", "d", |_| true) else {
            unreachable!("it is held")
        };
        assert!(matches!(
            keys.reserve(&me, "k", "other", |_| true),
            Reserved::Other
        ));
        assert!(matches!(
            keys.reserve(&"tenant".into(), "k", "other", |_| true),
            Reserved::New(_)
        ));
        guard.fulfil(id(1));
        assert!(
            through.changed().await.is_err(),
            "it closes when the first is through"
        );
        assert!(matches!(keys.reserve(&me, "k", "d", |_| true), Reserved::Same(same) if same == id(1)));
        assert!(matches!(
            keys.reserve(&me, "k", "other", |_| true),
            Reserved::Other
        ));
    }

    #[test]
    fn a_failed_request_frees_its_key_and_a_forgotten_row_too() {
        let (keys, me) = (Keys::default(), Arc::<str>::from("operator"));
        drop(keys.reserve(&me, "k", "d", |_| true));
        assert!(keys.is_empty());
        keys.restore(&me, "k", "d", id(1));
        assert!(matches!(keys.reserve(&me, "k", "d", |_| false), Reserved::New(_)));
    }

    #[test]
    fn keys_of_forgotten_rows_do_not_pile_up() {
        let (keys, me) = (Keys::default(), Arc::<str>::from("operator"));
        for n in 0..20 * SWEEP_FLOOR {
            match keys.reserve(&me, &n.to_string(), "d", |_| false) {
                Reserved::New(guard) => guard.fulfil(id(1)),
                other @ (Reserved::Same(_) | Reserved::Wait(_) | Reserved::Other) => {
                    unreachable!("{other:?}")
                }
            }
        }
        assert!(keys.len() <= SWEEP_FLOOR, "{}", keys.len());
    }
}
