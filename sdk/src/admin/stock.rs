//! Pools, templates and the node.

use sandbox_protocol::v1::{
    BuildStep, NodeDoctorReply, NodeDoctorRequest, NodeInfoReply, NodeInfoRequest, NodePingRequest,
    NodeReloadReply, NodeReloadRequest, Pool, PoolSpec, PoolsApplyRequest, PoolsDeleteRequest,
    PoolsListRequest, PoolsWatchReply, PoolsWatchRequest, Template, TemplatesBuildReply,
    TemplatesBuildRequest, TemplatesDeleteRequest, TemplatesGetRequest, TemplatesListRequest,
    templates_build_reply,
};
use tokio_stream::StreamExt as _;

use super::Events;
use crate::{
    client::{Client, Terms, via},
    error::Error,
    retry::Repeat,
};

/// The stocks of warm clones. Made by [`Client::pools`].
#[derive(Debug, Clone, Copy)]
pub struct Pools<'a>(pub(crate) &'a Client);

impl Pools<'_> {
    /// All pools, by name.
    ///
    /// # Errors
    /// TOKEN_REQUIRED.
    pub async fn list(&self) -> Result<Vec<Pool>, Error> {
        let terms = Terms::new(Repeat::Harmless);
        let reply = self
            .0
            .unary(terms, &PoolsListRequest {}, via!(pools_client.list))
            .await?;
        Ok(reply.pools)
    }

    /// Makes or changes a pool.
    ///
    /// # Errors
    /// FIELD_INVALID, POOL_FROM_FILE, LANE_UNAVAILABLE, SIZE_NOT_FOUND, TEMPLATE_NOT_FOUND, NOT_ALLOWED.
    pub async fn apply(&self, spec: PoolSpec) -> Result<Pool, Error> {
        let message = PoolsApplyRequest { spec: Some(spec) };
        self.0
            .unary(Terms::new(Repeat::OnWord), &message, via!(pools_client.apply))
            .await
    }

    /// Ends a pool's warm stock; its claims live on.
    ///
    /// # Errors
    /// POOL_NOT_FOUND, POOL_FROM_FILE, NOT_ALLOWED.
    pub async fn delete(&self, name: impl Into<String>) -> Result<(), Error> {
        let message = PoolsDeleteRequest { name: name.into() };
        let reply = self
            .0
            .unary(Terms::new(Repeat::OnWord), &message, via!(pools_client.delete))
            .await;
        reply.map(drop)
    }

    /// These pools (none named: all), `Synced`, then each change, at most 10 times a second.
    ///
    /// # Errors
    /// POOL_NOT_FOUND, TOKEN_REQUIRED.
    pub async fn watch(&self, pools: Vec<String>) -> Result<PoolsWatch, Error> {
        let message = PoolsWatchRequest { pools };
        let terms = Terms::new(Repeat::Harmless);
        let stream = self.0.open(terms, &message, via!(pools_client.watch)).await?;
        Ok(PoolsWatch(Events(stream)))
    }
}

/// Changes of pools. Dropping it ends the call.
#[derive(Debug)]
pub struct PoolsWatch(Events<PoolsWatchReply>);

impl PoolsWatch {
    /// The next change; nothing when the daemon ended the stream. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<PoolsWatchReply, Error>> {
        self.0.next().await
    }
}

/// What clones start from. Made by [`Client::templates`].
#[derive(Debug, Clone, Copy)]
pub struct Templates<'a>(pub(crate) &'a Client);

impl Templates<'_> {
    /// Begins a build. Its steps are read from the [`TemplateBuild`]; dropping that leaves nothing behind.
    ///
    /// # Errors
    /// FIELD_INVALID, IMAGE_NOT_FOUND, SIZE_NOT_FOUND, LANE_UNAVAILABLE, TEMPLATE_EXISTS, NOT_ALLOWED.
    pub async fn build(&self, request: TemplatesBuildRequest) -> Result<TemplateBuild, Error> {
        let stream = self
            .0
            .open(Terms::new(Repeat::OnWord), &request, via!(templates_client.build))
            .await?;
        Ok(TemplateBuild(Events(stream)))
    }

    /// All templates, by name.
    ///
    /// # Errors
    /// TOKEN_REQUIRED.
    pub async fn list(&self) -> Result<Vec<Template>, Error> {
        let terms = Terms::new(Repeat::Harmless);
        let reply = self
            .0
            .unary(terms, &TemplatesListRequest {}, via!(templates_client.list))
            .await?;
        Ok(reply.templates)
    }

    /// One template.
    ///
    /// # Errors
    /// TEMPLATE_NOT_FOUND.
    pub async fn get(&self, name: impl Into<String>) -> Result<Template, Error> {
        let message = TemplatesGetRequest { name: name.into() };
        let terms = Terms::new(Repeat::Harmless);
        self.0.unary(terms, &message, via!(templates_client.get)).await
    }

    /// Removes a template that nothing uses.
    ///
    /// # Errors
    /// TEMPLATE_NOT_FOUND, TEMPLATE_IN_USE, NOT_ALLOWED.
    pub async fn delete(&self, name: impl Into<String>) -> Result<(), Error> {
        let message = TemplatesDeleteRequest { name: name.into() };
        let reply = self
            .0
            .unary(
                Terms::new(Repeat::OnWord),
                &message,
                via!(templates_client.delete),
            )
            .await;
        reply.map(drop)
    }
}

/// A build under way. Dropping it cancels the build, and nothing is left of it.
#[derive(Debug)]
pub struct TemplateBuild(Events<TemplatesBuildReply>);

impl TemplateBuild {
    /// The next event: a step, a piece of the guest's console, or the template. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<TemplatesBuildReply, Error>> {
        self.0.next().await
    }

    /// Waits for the template and tells of each step.
    ///
    /// # Errors
    /// TEMPLATE_FAILED, TEMPLATE_TOO_OLD, CAPACITY; or the stream ended without a template.
    pub async fn finish(mut self, mut on_step: impl FnMut(&BuildStep)) -> Result<Template, Error> {
        while let Some(event) = self.next().await {
            match event?.event {
                Some(templates_build_reply::Event::Step(step)) => on_step(&step),
                Some(templates_build_reply::Event::Template(template)) => return Ok(template),
                Some(templates_build_reply::Event::Console(_)) | None => {}
            }
        }
        Err(Error::unfinished("the build ended without a template"))
    }
}

/// The host and its daemon. Made by [`Client::node`].
#[derive(Debug, Clone, Copy)]
pub struct Node<'a>(pub(crate) &'a Client);

impl Node<'_> {
    /// What the daemon says of itself and its host.
    ///
    /// # Errors
    /// TOKEN_REQUIRED.
    pub async fn info(&self) -> Result<NodeInfoReply, Error> {
        let terms = Terms::new(Repeat::Harmless);
        self.0
            .unary(terms, &NodeInfoRequest {}, via!(node_client.info))
            .await
    }

    /// The checks of the host, run by the daemon.
    ///
    /// # Errors
    /// NOT_ALLOWED.
    pub async fn doctor(&self) -> Result<NodeDoctorReply, Error> {
        let terms = Terms::new(Repeat::Harmless);
        self.0
            .unary(terms, &NodeDoctorRequest {}, via!(node_client.doctor))
            .await
    }

    /// Reads the configuration file again: all of it or nothing.
    ///
    /// # Errors
    /// RELOAD_REFUSED, NOT_ALLOWED.
    pub async fn reload(&self) -> Result<NodeReloadReply, Error> {
        let terms = Terms::new(Repeat::OnWord);
        self.0
            .unary(terms, &NodeReloadRequest {}, via!(node_client.reload))
            .await
    }

    /// Does nothing: what a call costs by itself.
    ///
    /// # Errors
    /// TOKEN_REQUIRED.
    pub async fn ping(&self) -> Result<(), Error> {
        let terms = Terms::new(Repeat::Harmless);
        let reply = self
            .0
            .unary(terms, &NodePingRequest {}, via!(node_client.ping))
            .await;
        reply.map(drop)
    }
}
