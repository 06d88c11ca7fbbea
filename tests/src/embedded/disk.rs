//! Disk images, and what the guest wrote to them.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use guest_image::pattern::{self, SECTOR_WORDS, Tag};

/// Bytes of a sector, as virtio-blk counts.
pub const SECTOR_BYTES: u64 = 512;

/// An image file.
pub struct Image {
    path: PathBuf,
}

impl Image {
    /// A sparse image of `len` bytes.
    ///
    /// # Panics
    /// It cannot be made.
    pub fn new(directory: &tempfile::TempDir, name: &str, len: u64) -> Image {
        let path = directory.path().join(name);
        let file =
            File::create(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        file.set_len(len).expect("the length of an image");
        Image { path }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its bytes from `offset`.
    ///
    /// # Panics
    /// They cannot be read.
    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let file = File::open(&self.path).expect("an image");
        file.read_exact_at(&mut bytes, offset)
            .expect("bytes of an image");
        bytes
    }

    /// Writes bytes at `offset`.
    ///
    /// # Panics
    /// They cannot be written.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        let file = File::options()
            .write(true)
            .open(&self.path)
            .expect("an image");
        file.write_all_at(bytes, offset).expect("bytes of an image");
    }

    /// All its bytes.
    ///
    /// # Panics
    /// They cannot be read.
    pub fn bytes(&self) -> Vec<u8> {
        fs::read(&self.path).expect("an image")
    }

    /// How much of it takes room on its filesystem.
    ///
    /// # Panics
    /// The file is gone.
    pub fn allocated_bytes(&self) -> u64 {
        self.path.metadata().expect("an image").blocks() * SECTOR_BYTES
    }

    /// The tag of a sector that the guest wrote.
    ///
    /// # Panics
    /// The sector is not whole.
    pub fn tag(&self, sector: u64) -> Tag {
        let bytes = self.read(sector * SECTOR_BYTES, SECTOR_BYTES as usize);
        let mut words = [0; SECTOR_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_ne_bytes(bytes.try_into().expect("8 bytes"));
        }
        pattern::check(&words).unwrap_or_else(|damage| {
            panic!("sector {sector} of {}: {damage:?}", self.path.display())
        })
    }

    /// Sees that `sectors` were written by the guest, for this disk and place, in one generation.
    ///
    /// # Panics
    /// One was not.
    pub fn expect_written(&self, sectors: std::ops::Range<u64>, disk: u32, generation: u32) {
        for sector in sectors {
            let expected = Tag {
                sector,
                disk,
                generation,
            };
            assert_eq!(self.tag(sector), expected, "{}", self.path.display());
        }
    }
}
