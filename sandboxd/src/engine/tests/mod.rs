//! What tests of other rooms need of this one.

pub(crate) mod fake;
