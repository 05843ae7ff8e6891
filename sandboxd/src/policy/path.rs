//! Paths of requests, as rules judge them.

/// The path without its query.
pub(super) fn without_query(path: &str) -> &str {
    path.split(['?', '#']).next().unwrap_or_default()
}

/// Whether every server reads the path alike: no dot segment, no `//`, no backslash, and no encoded slash, backslash, dot
/// or NUL.
pub(super) fn is_canonical(path: &str) -> bool {
    let path = without_query(path);
    let segments = path.strip_prefix('/').unwrap_or(path);
    let dots = segments.split('/').any(|segment| matches!(segment, "." | ".."));
    let lower = path.to_ascii_lowercase();
    let encoded = ["%2f", "%5c", "%2e", "%00"]
        .iter()
        .any(|code| lower.contains(code));
    path.starts_with('/') && !dots && !encoded && !path.contains("//") && !path.contains('\\')
}

/// Whether a path lies below a prefix, by whole segments: `/v1` holds `/v1` and `/v1/x`, not `/v10`.
pub(super) fn lies_below(path: &str, prefix: &str) -> bool {
    let path = without_query(path);
    match path.strip_prefix(prefix) {
        Some(rest) => prefix.ends_with('/') || rest.is_empty() || rest.starts_with('/'),
        // `/legacy/` is about `/legacy/x` and not about `/legacy`.
        None => false,
    }
}
