//! Status details of a guest that no client could decode.
//!
//! tonic panics on a `grpc-status-details-bin` that is not base64, in whoever reads the status: in this daemon where it
//! asks a guest itself, and in any client of the API. So they never leave the link.

use base64::{
    Engine as _, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use http::{HeaderMap, HeaderName};

const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Drops details that do not decode, and all of them where there are several.
pub(super) fn drop_undecodable(headers: &mut HeaderMap) {
    let mut values = headers.get_all(DETAILS).iter();
    let bad = values
        .next()
        .is_some_and(|value| LENIENT.decode(value.as_bytes()).is_err());
    if bad || values.next().is_some() {
        headers.remove(DETAILS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_details_that_decode_pass() {
        for (values, kept) in [
            (&["AAAA"][..], true),
            (&["AAA="], true),
            (&["AAA"], true),
            (&[""], true),
            (&["%%%"], false),
            (&["A"], false),
            (&["AAAA", "%%%"], false),
        ] {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(DETAILS, value.parse().unwrap());
            }
            drop_undecodable(&mut headers);
            assert_eq!(headers.contains_key(DETAILS), kept, "{values:?}");
            // What passes does not panic in tonic.
            headers.insert("grpc-status", "9".parse().unwrap());
            assert!(tonic::Status::from_header_map(&headers).is_some());
        }
    }
}
