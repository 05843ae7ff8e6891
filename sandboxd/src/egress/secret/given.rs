//! What one request is given.

use std::fmt;

use http::{HeaderMap, HeaderName, HeaderValue};

/// A secret that a request is given.
#[derive(Clone)]
pub struct Given {
    pub(super) name: String,
    pub(super) header: HeaderName,
    pub(super) value: HeaderValue,
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Given")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Given {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets its field, in place of all that there are of that name.
    pub fn write(self, headers: &mut HeaderMap) {
        headers.insert(self.header, self.value);
    }
}
