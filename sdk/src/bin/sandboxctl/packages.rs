//! `completions` and `man`: what packages ship.

use std::path::Path;

use clap::CommandFactory as _;

use crate::{args::Cli, fault::Fault, print};

pub(crate) fn completions(shell: clap_complete::Shell) -> Result<(), Fault> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "sandboxctl", &mut text);
    print::raw(&text)
}

pub(crate) fn man(dir: &Path) -> Result<(), Fault> {
    std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), dir))
        .map_err(|error| Fault::io("man", error))
}
