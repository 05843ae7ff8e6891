//! What the kernel says, as messages.

use std::mem::MaybeUninit;

use rustix::{
    fs::inotify::{self, ReadFlags},
    io::Errno,
};
use sandbox_protocol::v1::{WatchEvent, WatchKind, WatchOut, WatchReady, WatchRenamed, watch_out::M};

use super::tree::Tree;
use crate::{fs::workers::Cancel, refusal::Refusal};

/// Messages of one step. What a directory holds that has come may be more: then all is lost, and said so.
pub(super) const BEHIND: usize = 1024;
/// Bytes of events that are read at once: at least one with the longest name.
const BUFFER: usize = 4096;

/// A watch's state.
#[derive(Debug)]
pub(super) struct Watching {
    pub(super) tree: Tree,
    /// A name that went away, and may be about to come back under another.
    moved: Option<Moved>,
}

/// The first half of a rename.
#[derive(Debug)]
struct Moved {
    cookie: u32,
    number: i32,
    name: Vec<u8>,
    path: Option<Vec<u8>>,
    dir: bool,
}

/// An event, taken out of the kernel's buffer.
#[derive(Debug)]
struct Event {
    number: i32,
    what: ReadFlags,
    cookie: u32,
    name: Vec<u8>,
}

/// What a step brought.
#[derive(Debug, Default)]
pub(super) struct News {
    pub(super) out: Vec<WatchOut>,
    /// Why something was lost.
    pub(super) lost: Option<&'static str>,
    /// The root is gone: nothing more will come.
    pub(super) over: bool,
    /// Half a rename is there, and the other half may come.
    pub(super) half: bool,
    /// Why the watch ends, behind all this.
    pub(super) failed: Option<Refusal>,
}

impl News {
    fn tell(&mut self, m: M) {
        if self.out.len() < BEHIND {
            self.out.push(WatchOut { m: Some(m) });
        } else {
            self.lost = Some("client");
        }
    }

    fn event(&mut self, kind: WatchKind, path: Vec<u8>, directory: bool) {
        self.tell(M::Event(WatchEvent {
            kind: kind.into(),
            path: path.into(),
            directory,
        }));
    }

    fn gone(&mut self) {
        self.event(WatchKind::Deleted, Vec::new(), true);
        self.over = true;
    }
}

impl Watching {
    pub(super) const fn new(tree: Tree) -> Self {
        Self { tree, moved: None }
    }

    pub(super) fn ready(&self) -> WatchOut {
        WatchOut {
            m: Some(M::Ready(WatchReady {
                directories: self.tree.count(),
            })),
        }
    }

    /// Reads what is there and makes messages of it. `waited`: the other half of a rename had its time.
    pub(super) fn read(&mut self, waited: bool, cancel: &Cancel) -> News {
        let mut news = News::default();
        let mut any = false;
        while news.out.len() < BEHIND / 2 && !news.over && news.lost.is_none() && news.failed.is_none() {
            let events = self.events();
            if events.is_empty() {
                break;
            }
            any = true;
            for event in events {
                let taken = cancel.check().and_then(|()| self.take(event, &mut news, cancel));
                if let Err(refusal) = taken {
                    news.failed = Some(refusal);
                    break;
                }
            }
        }
        if waited && !any {
            self.settle(&mut news);
        }
        news.half = self.moved.is_some();
        news
    }

    /// Throws away what is there.
    pub(super) fn discard(&mut self) {
        self.moved = None;
        loop {
            let events = self.events();
            if events.is_empty() {
                return;
            }
            for event in events {
                if event.what.contains(ReadFlags::IGNORED) {
                    self.tree.forget(event.number);
                }
            }
        }
    }

    /// Arms all of it anew.
    pub(super) fn again(&mut self, cancel: &Cancel) -> Result<News, Refusal> {
        let mut news = News::default();
        self.moved = None;
        match self.tree.again(cancel) {
            Ok(()) => news.out.push(self.ready()),
            Err(refusal) if refusal.reason == sandbox_protocol::reason::Reason::PathNotFound => news.gone(),
            Err(refusal) => return Err(refusal),
        }
        Ok(news)
    }

    fn events(&self) -> Vec<Event> {
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut reader = inotify::Reader::new(&**self.tree.notify(), &mut buffer);
        let mut events = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => events.push(Event {
                    number: event.wd(),
                    what: event.events(),
                    cookie: event.cookie(),
                    name: event
                        .file_name()
                        .map(|name| name.to_bytes().to_vec())
                        .unwrap_or_default(),
                }),
                Err(Errno::INTR) => continue,
                // Nothing is there now; a queue of ours has no other fault.
                Err(_) => return events,
            }
            if reader.is_buffer_empty() {
                return events;
            }
        }
    }

    /// The other half did not come: what went away left the tree.
    fn settle(&mut self, news: &mut News) {
        if let Some(moved) = self.moved.take() {
            if moved.dir {
                self.tree.leave(moved.number, &moved.name);
            }
            if let Some(path) = moved.path {
                news.event(WatchKind::Deleted, path, moved.dir);
            }
        }
    }

    fn take(&mut self, event: Event, news: &mut News, cancel: &Cancel) -> Result<(), Refusal> {
        let what = event.what;
        if news.over {
            return Ok(());
        }
        if what.contains(ReadFlags::QUEUE_OVERFLOW) {
            news.lost = Some("kernel");
            return Ok(());
        }
        if what.contains(ReadFlags::MOVED_TO) {
            return self.arrived(&event, news, cancel);
        }
        self.settle(news);
        if what.contains(ReadFlags::IGNORED) {
            if self.tree.is_root(event.number) {
                news.gone();
            }
            self.tree.forget(event.number);
            return Ok(());
        }
        if event.name.is_empty() {
            self.itself(&event, news);
            return Ok(());
        }
        let Some(path) = self.tree.path(event.number, &event.name) else {
            return Ok(());
        };
        let dir = what.contains(ReadFlags::ISDIR);
        if what.contains(ReadFlags::MOVED_FROM) {
            let path = (!self.tree.excludes(&path)).then_some(path);
            self.moved = Some(Moved {
                cookie: event.cookie,
                number: event.number,
                name: event.name,
                path,
                dir,
            });
            return Ok(());
        }
        if self.tree.excludes(&path) {
            return Ok(());
        }
        if what.contains(ReadFlags::CREATE) {
            news.event(WatchKind::Created, path, dir);
            if dir {
                self.come(&event, news, cancel)?;
            }
        } else if what.contains(ReadFlags::DELETE) {
            news.event(WatchKind::Deleted, path, dir);
        } else if what.contains(ReadFlags::MODIFY) {
            news.event(WatchKind::Modified, path, dir);
        } else if what.contains(ReadFlags::ATTRIB) {
            news.event(WatchKind::Attrib, path, dir);
        }
        Ok(())
    }

    /// Of an armed directory itself. What the one above tells of it too is not told twice.
    fn itself(&mut self, event: &Event, news: &mut News) {
        if !self.tree.is_root(event.number) {
            return;
        }
        let ends = ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT;
        if event.what.intersects(ends) {
            news.gone();
        } else if event.what.contains(ReadFlags::MODIFY) {
            news.event(WatchKind::Modified, Vec::new(), false);
        } else if event.what.contains(ReadFlags::ATTRIB) {
            let dir = event.what.contains(ReadFlags::ISDIR);
            news.event(WatchKind::Attrib, Vec::new(), dir);
        }
    }

    fn come(&mut self, event: &Event, news: &mut News, cancel: &Cancel) -> Result<(), Refusal> {
        let found = &mut |path, dir| news.event(WatchKind::Created, path, dir);
        self.tree.come(event.number, &event.name, cancel, found)
    }

    /// The second half of a rename, or something from elsewhere.
    fn arrived(&mut self, event: &Event, news: &mut News, cancel: &Cancel) -> Result<(), Refusal> {
        let dir = event.what.contains(ReadFlags::ISDIR);
        let path = self
            .tree
            .path(event.number, &event.name)
            .filter(|path| !self.tree.excludes(path));
        match self.moved.take() {
            Some(moved) if moved.cookie == event.cookie => match (moved.path, path) {
                (Some(from), Some(to)) => {
                    if dir {
                        self.tree
                            .rename((moved.number, &moved.name), (event.number, &event.name));
                    }
                    news.tell(M::Renamed(WatchRenamed {
                        from: from.into(),
                        to: to.into(),
                        directory: dir,
                    }));
                }
                (Some(from), None) => {
                    self.tree.leave(moved.number, &moved.name);
                    news.event(WatchKind::Deleted, from, dir);
                    return Ok(());
                }
                (None, Some(to)) => news.event(WatchKind::Created, to, dir),
                (None, None) => return Ok(()),
            },
            other => {
                self.moved = other;
                self.settle(news);
                let Some(path) = path else { return Ok(()) };
                news.event(WatchKind::Created, path, dir);
            }
        }
        // After a rename too: what came into it on the way was looked for under its old name.
        if dir {
            self.come(event, news, cancel)?;
        }
        Ok(())
    }
}
