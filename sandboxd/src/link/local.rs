//! Calls that are answered in this process.

use tonic::body::Body;

use super::{
    Answer, LinkBody, LinkError,
    signals::{Place, Signals},
};

pub(super) async fn call(
    answerer: &dyn Answer,
    signals: &Signals,
    request: http::Request<Body>,
    place: Place,
) -> Result<http::Response<LinkBody>, LinkError> {
    tokio::select! {
        biased;
        _why = signals.lost.wait() => Err(LinkError::Lost(h2::Reason::CANCEL.into())),
        response = answerer.answer(request) => Ok(response.map(|body| LinkBody::local(body, place))),
    }
}
