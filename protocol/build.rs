//! Compiles the protos with protox, so that no `protoc` is needed, and keeps their descriptor set for
//! reflection and for the contract tests.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message as _;

const FILES: &[&str] = &[
    "agent",
    "run",
    "processes",
    "sessions",
    "files",
    "tools",
    "control",
    "claims",
    "egress",
    "pools",
    "templates",
    "node",
    "types",
];

#[expect(clippy::disallowed_methods, reason = "a build script writes its output")]
fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files: Vec<String> = FILES
        .iter()
        .map(|name| format!("sandbox/v1/{name}.proto"))
        .collect();
    let set = protox::compile(&files, ["proto"])?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    fs::write(out.join("sandbox_v1.bin"), set.encode_to_vec())?;

    // Reflection and generic clients must not learn of the host's own service.
    let mut public = set.clone();
    public
        .file
        .retain(|file| file.name() != "sandbox/v1/control.proto");
    fs::write(out.join("sandbox_v1_public.bin"), public.encode_to_vec())?;

    let mut config = tonic_prost_build::Config::new();
    config.bytes(["."]);
    tonic_prost_build::configure()
        .build_transport(false)
        // For those who stand in for a service in a test; `silkd/tests` proves that silkd itself serves every method.
        .generate_default_stubs(true)
        .compile_fds_with_config(set, config)?;
    Ok(())
}
