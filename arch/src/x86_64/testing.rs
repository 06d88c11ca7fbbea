//! Hand-made kernels for tests.

/// A segment of [`elf`].
pub struct Load<'a> {
    pub address: u64,
    pub bytes: &'a [u8],
    /// Length in memory, at least that of `bytes`.
    pub memory_bytes: u64,
}

const EHDR: usize = 64;
const PHDR: usize = 56;
pub const PT_LOAD: u32 = 1;
pub const PT_NOTE: u32 = 4;

/// An x86_64 ELF executable; `notes` become a PT_NOTE segment if there are any.
pub fn elf(entry: u64, loads: &[Load], notes: &[u8]) -> Vec<u8> {
    let count = loads.len() + usize::from(!notes.is_empty());
    let mut file = vec![0; EHDR + count * PHDR];
    file[..4].copy_from_slice(b"\x7fELF");
    file[4..7].copy_from_slice(&[2, 1, 1]);
    put(&mut file, 16, &2u16.to_le_bytes());
    put(&mut file, 18, &62u16.to_le_bytes());
    put(&mut file, 20, &1u32.to_le_bytes());
    put(&mut file, 24, &entry.to_le_bytes());
    put(&mut file, 32, &(EHDR as u64).to_le_bytes());
    put(&mut file, 52, &(EHDR as u16).to_le_bytes());
    put(&mut file, 54, &(PHDR as u16).to_le_bytes());
    put(&mut file, 56, &(count as u16).to_le_bytes());
    for (i, load) in loads.iter().enumerate() {
        program_header(&mut file, i, PT_LOAD, load);
        file.extend_from_slice(load.bytes);
    }
    if !notes.is_empty() {
        let load = Load {
            address: 0,
            bytes: notes,
            memory_bytes: notes.len() as u64,
        };
        program_header(&mut file, loads.len(), PT_NOTE, &load);
        file.extend_from_slice(notes);
    }
    file
}

fn program_header(file: &mut [u8], index: usize, kind: u32, load: &Load) {
    let at = EHDR + index * PHDR;
    let offset = file.len() as u64;
    put(file, at, &kind.to_le_bytes());
    put(file, at + 4, &7u32.to_le_bytes());
    put(file, at + 8, &offset.to_le_bytes());
    put(file, at + 16, &load.address.to_le_bytes());
    put(file, at + 24, &load.address.to_le_bytes());
    put(file, at + 32, &(load.bytes.len() as u64).to_le_bytes());
    put(file, at + 40, &load.memory_bytes.to_le_bytes());
    put(file, at + 48, &4u64.to_le_bytes());
}

/// One ELF note, padded to 4 bytes.
pub fn note(name: &[u8], kind: u32, desc: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for word in [name.len() as u32, desc.len() as u32, kind] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    for part in [name, desc] {
        out.extend_from_slice(part);
        out.resize(out.len().next_multiple_of(4), 0);
    }
    out
}

/// The PVH note with a 32-bit entry.
pub fn pvh_note(entry: u32) -> Vec<u8> {
    note(b"Xen\0", 18, &entry.to_le_bytes())
}

/// What a bzImage's header says; the fields have the names of the boot protocol.
pub struct BzImage {
    pub version: u16,
    pub loadflags: u8,
    pub xloadflags: u16,
    pub setup_sects: u8,
    pub pref_address: u64,
    pub init_size: u32,
    pub kernel_alignment: u32,
    pub relocatable_kernel: u8,
    pub cmdline_size: u32,
    pub initrd_addr_max: u32,
    pub payload_length: u32,
    /// Protected-mode code.
    pub code: Vec<u8>,
}

impl Default for BzImage {
    fn default() -> BzImage {
        BzImage {
            version: 0x020f,
            loadflags: 1,
            xloadflags: 1,
            setup_sects: 3,
            pref_address: 16 << 20,
            init_size: 4 << 20,
            kernel_alignment: 2 << 20,
            relocatable_kernel: 1,
            cmdline_size: 2047,
            initrd_addr_max: 0x7fff_ffff,
            payload_length: 0x100,
            code: (0..0x3000u32).map(|i| i as u8).collect(),
        }
    }
}

impl BzImage {
    pub const VERSION: &'static str = "6.1.0-test";

    pub fn build(&self) -> Vec<u8> {
        let setup = match self.setup_sects {
            0 => 4,
            n => usize::from(n),
        };
        let mut file = vec![0; (setup + 1) * 512];
        put(&mut file, 0x1f1, &[self.setup_sects]);
        put(&mut file, 0x1fe, &[0x55, 0xaa]);
        // Jump over the header: it ends at 0x202 + 0x6a.
        put(&mut file, 0x200, &[0xeb, 0x6a]);
        put(&mut file, 0x202, b"HdrS");
        put(&mut file, 0x206, &self.version.to_le_bytes());
        put(&mut file, 0x20e, &0x200u16.to_le_bytes());
        put(&mut file, 0x400, Self::VERSION.as_bytes());
        put(&mut file, 0x211, &[self.loadflags]);
        put(&mut file, 0x22c, &self.initrd_addr_max.to_le_bytes());
        put(&mut file, 0x230, &self.kernel_alignment.to_le_bytes());
        put(&mut file, 0x234, &[self.relocatable_kernel]);
        put(&mut file, 0x236, &self.xloadflags.to_le_bytes());
        put(&mut file, 0x238, &self.cmdline_size.to_le_bytes());
        put(&mut file, 0x248, &0x200u32.to_le_bytes());
        put(&mut file, 0x24c, &self.payload_length.to_le_bytes());
        put(&mut file, 0x258, &self.pref_address.to_le_bytes());
        put(&mut file, 0x260, &self.init_size.to_le_bytes());
        // Code after the header, which is no part of it.
        put(&mut file, 0x26c, &[0xcc; 4]);
        file.extend_from_slice(&self.code);
        file
    }
}

fn put(file: &mut [u8], at: usize, bytes: &[u8]) {
    file[at..at + bytes.len()].copy_from_slice(bytes);
}
