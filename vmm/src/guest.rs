//! The embedded guest on the command line: to write it to a file, for this VMM or another, and to say
//! what it understands.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::{Subcommand, ValueEnum};

/// `pollux guest`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Write the guest to a file that can be given as --kernel, here or to QEMU's microvm
    Export {
        /// The form: how a VMM boots it depends on it
        #[arg(long = "as", value_name = "FORM", default_value = "pvh")]
        form: Form,
        /// The file to write
        file: PathBuf,
    },
    /// Print what the guest's command line may hold
    Options,
}

/// A form of the guest's image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Form {
    /// ELF with a PVH note: PVH's 32-bit protocol, if the VMM knows it
    Pvh,
    /// ELF without the note: Linux' 64-bit protocol
    Linux64,
    /// bzImage with a 64-bit entry: Linux' 64-bit protocol
    Bzimage,
}

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is none for this processor.
    #[error(
        "guest: the embedded guest is written for x86_64 only; give a Linux kernel as --kernel"
    )]
    NoGuest,
    /// The file cannot be written.
    #[error("guest export {}: {source}", file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The guest's image.
///
/// # Errors
/// [`Error::NoGuest`] on other processors than x86_64.
pub fn image(form: Form) -> Result<Vec<u8>, Error> {
    let image = match form {
        Form::Pvh => guest_image::elf().map(<[u8]>::to_vec),
        Form::Linux64 => guest_image::elf_without_note(),
        Form::Bzimage => guest_image::bzimage(),
    };
    image.ok_or(Error::NoGuest)
}

/// Does what the command says.
///
/// # Errors
/// See [`Error`].
pub fn run(command: &Command) -> Result<(), Error> {
    match command {
        Command::Export { form, file } => {
            let image = image(*form)?;
            fs::write(file, image).map_err(|source| Error::Write {
                file: file.clone(),
                source,
            })
        }
        Command::Options => {
            // A reader that closes its end has read enough.
            let _ = io::stdout().write_all(guest_image::command_line_help().as_bytes());
            Ok(())
        }
    }
}
