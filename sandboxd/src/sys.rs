//! What rustix cannot do: the one file of this crate that may hold unsafe code.
//!
//! May call: nothing.
//! Never inside: a decision. One operation a block, with SAFETY and why no safe way exists.
