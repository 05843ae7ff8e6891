//! A stream of HTTP/2 whose client takes nothing of its answer, given up as a body that rests is.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use super::{BODY, tunnel::stalled};

tokio::task_local! {
    /// Counts up from an answer's head on, with each part of it that its client has room for.
    static TAKEN: Arc<AtomicU64>;
}

/// Runs a stream until it is through, or its client takes nothing of its answer for as long as a body may rest. hyper asks
/// for no more of a body then, so that the body itself would never know.
pub(super) async fn in_time(stream: impl Future<Output = ()>) {
    let taken = Arc::new(AtomicU64::new(0));
    tokio::select! {
        biased;
        () = TAKEN.scope(Arc::clone(&taken), stream) => {}
        () = stalled(&taken, BODY) => {}
    }
}

/// The client of this stream, where it is one, has something of its answer.
pub(super) fn took() {
    // In HTTP/1 the connection itself looks after that.
    TAKEN
        .try_with(|taken| {
            taken.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap_or(());
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stream_whose_answer_nobody_takes_is_given_up() {
        let begun = Instant::now();
        let untaken = async {
            // However long the origin thinks, nobody can have taken anything.
            sleep(3 * BODY).await;
            took();
            for _ in 0..3 {
                sleep(BODY / 2).await;
                took();
            }
            pending().await
        };
        in_time(untaken).await;
        let last = 3 * BODY + 3 * (BODY / 2);
        assert!(begun.elapsed() > last + BODY / 2, "{:?}", begun.elapsed());
        assert!(begun.elapsed() <= last + 2 * BODY, "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_is_taken_goes_on() {
        let begun = Instant::now();
        in_time(async {
            for _ in 0..20 {
                took();
                sleep(BODY / 2).await;
            }
        })
        .await;
        assert_eq!(begun.elapsed().as_secs(), (BODY * 10).as_secs());
    }
}
