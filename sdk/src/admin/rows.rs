//! Claims as rows.

use std::collections::HashMap;

use sandbox_protocol::v1::{
    ClaimsListReply, ClaimsListRequest, ClaimsWatchReply, ClaimsWatchRequest, Sandbox, State,
};
use tokio_stream::StreamExt as _;

use super::Events;
use crate::{
    client::{Client, Terms, via},
    error::Error,
    retry::Repeat,
};

/// Rows of a page: the largest number whose rows, with all the labels they may have, fit into one message.
const PAGE: u32 = 250;

/// Which sandboxes; the default is all that are claimed, ending or failed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SandboxFilter {
    /// Any of these states; empty: CLAIMED, ENDING, FAILED.
    pub states: Vec<State>,
    /// Any of these pools; empty: all.
    pub pools: Vec<String>,
    /// All of these labels.
    pub labels: HashMap<String, String>,
    /// Of this owner.
    pub owner: Option<String>,
}

impl SandboxFilter {
    fn states(&self) -> Vec<i32> {
        self.states.iter().copied().map(i32::from).collect()
    }
}

/// Claims as rows. Made by [`Client::claims`].
#[derive(Debug, Clone, Copy)]
pub struct Claims<'a>(pub(crate) &'a Client);

impl Claims<'_> {
    /// One page, in the order of ids; `page_token` is empty or the previous reply's `next_page_token`.
    ///
    /// # Errors
    /// FIELD_INVALID, PAGE_TOKEN_INVALID, TOKEN_REQUIRED.
    pub async fn page(
        &self,
        filter: &SandboxFilter,
        page_size: u32,
        page_token: String,
    ) -> Result<ClaimsListReply, Error> {
        let message = ClaimsListRequest {
            states: filter.states(),
            pools: filter.pools.clone(),
            labels: filter.labels.clone(),
            owner: filter.owner.clone(),
            page_size,
            page_token,
        };
        let terms = Terms::new(Repeat::Harmless);
        self.0.unary(terms, &message, via!(claims_client.list)).await
    }

    /// All that match, page by page. The time of a call counts for each page.
    ///
    /// # Errors
    /// See [`page`](Self::page).
    pub async fn list(&self, filter: &SandboxFilter) -> Result<Vec<Sandbox>, Error> {
        let mut sandboxes = Vec::new();
        let mut token = String::new();
        loop {
            let page = self.page(filter, PAGE, token).await?;
            // A daemon whose pages do not end would fill the memory: a page without rows is the last.
            let last = page.next_page_token.is_empty() || page.sandboxes.is_empty();
            sandboxes.extend(page.sandboxes);
            if last {
                return Ok(sandboxes);
            }
            token = page.next_page_token;
        }
    }

    /// All that match, `Synced`, then each change; `Lost` means that the reader was slow and all comes again.
    ///
    /// # Errors
    /// FIELD_INVALID, TOKEN_REQUIRED.
    pub async fn watch(&self, filter: &SandboxFilter) -> Result<ClaimsWatch, Error> {
        let message = ClaimsWatchRequest {
            states: filter.states(),
            pools: filter.pools.clone(),
            labels: filter.labels.clone(),
            owner: filter.owner.clone(),
        };
        let terms = Terms::new(Repeat::Harmless);
        let stream = self.0.open(terms, &message, via!(claims_client.watch)).await?;
        Ok(ClaimsWatch(Events(stream)))
    }
}

/// Changes of sandboxes. Dropping it ends the call.
#[derive(Debug)]
pub struct ClaimsWatch(Events<ClaimsWatchReply>);

impl ClaimsWatch {
    /// The next change; nothing when the daemon ended the stream. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<ClaimsWatchReply, Error>> {
        self.0.next().await
    }
}
