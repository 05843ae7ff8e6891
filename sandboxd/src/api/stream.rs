//! The streams that services answer with.

use std::pin::Pin;

use futures_util::Stream;
use tonic::Status;

/// A reply of many messages.
pub(super) type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;
