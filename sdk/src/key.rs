//! Request keys: what makes a repeated request the same request.
//!
//! May call: error.
//! Never inside: who uses them.

use crate::error::Error;

/// A key that nobody else has.
pub(crate) fn random() -> Result<String, Error> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits)
        .map_err(|source| Error::invalid("request_key", format!("no randomness for one: {source}")))?;
    Ok(format!("sdk-{:032x}", u128::from_ne_bytes(bits)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_and_fit() {
        let (one, two) = (random().unwrap(), random().unwrap());
        assert_ne!(one, two);
        assert!(one.len() <= sandbox_protocol::limits::REQUEST_KEY);
    }
}
