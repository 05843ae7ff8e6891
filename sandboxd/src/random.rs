//! Random bytes of the kernel: the one home, so that everything else takes randomness as a parameter.
//!
//! May call: nothing.
//! Never inside: a generator of our own.

/// That many random bytes.
///
/// # Panics
/// Where the kernel has no randomness to give, which no Linux that runs tokio does.
#[must_use]
pub fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .expect("getrandom(2) is there since Linux 3.17 and blocks until it is seeded");
    bytes
}
