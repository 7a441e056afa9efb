//! Memory with contents that say where they belong. Filled, copied and compared a word or a block at a time: unoptimized, as
//! tests are, a byte at a time takes longer than all transfers.

use std::cell::UnsafeCell;
use std::ops::Range;

use kvferry::mem::MemoryRange;
use kvferry::proto::wire::MemoryKind;

/// The bytes from `8 * index` on of the pattern `seed`: other seeds and other places give other bytes.
fn word(seed: u64, index: usize) -> [u8; 8] {
    let mut word = (index as u64).wrapping_add(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (word ^ (word >> 31)).to_le_bytes()
}

/// The first `len` bytes of the pattern `seed`.
pub fn pattern_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (index, eight) in bytes.chunks_mut(8).enumerate() {
        eight.copy_from_slice(&word(seed, index)[..eight.len()]);
    }
    bytes
}

/// A part of the pattern `seed`.
pub fn pattern_part(seed: u64, range: Range<usize>) -> Vec<u8> {
    let from = range.start / 8 * 8;
    let words = from / 8..range.end.div_ceil(8);
    let bytes: Vec<u8> = words.flat_map(|index| word(seed, index)).collect();
    bytes[range.start - from..range.end - from].to_vec()
}

/// The first place where `bytes` is not the pattern from `first` on.
pub fn mismatch(bytes: &[u8], seed: u64, first: usize) -> Option<usize> {
    difference(bytes, &pattern_part(seed, first..first + bytes.len()))
}

/// The first place where two equally long pieces of memory differ.
pub fn difference(one: &[u8], other: &[u8]) -> Option<usize> {
    if one == other { None } else { one.iter().zip(other).position(|(one, other)| one != other) }
}

/// Memory that UCX may write at any time, so it is only ever copied in and out.
pub struct Buffer(Box<[UnsafeCell<u8>]>);

impl Buffer {
    pub fn new(len: usize) -> Self {
        let bytes = Box::into_raw(vec![0u8; len].into_boxed_slice());
        // SAFETY: it came out of a box just now, and a cell is laid out as what is in it.
        Buffer(unsafe { Box::from_raw(bytes as *mut [UnsafeCell<u8>]) })
    }

    pub fn patterned(seed: u64, len: usize) -> Self {
        let buffer = Buffer::new(len);
        buffer.fill(seed);
        buffer
    }

    pub fn addr(&self) -> u64 {
        self.0.as_ptr().expose_provenance() as u64
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The first `len` bytes at `offset` as a range to register.
    pub fn range(&self, offset: usize, len: usize) -> MemoryRange {
        // SAFETY: every test keeps its buffers until its agents are gone, and reads them by copying only.
        unsafe { MemoryRange::new(self.addr() + offset as u64, len as u64, MemoryKind::Host) }.unwrap()
    }

    pub fn fill(&self, seed: u64) {
        self.write(&pattern_bytes(seed, self.len()));
    }

    pub fn zero(&self) {
        self.write(&vec![0; self.len()]);
    }

    fn write(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len());
        // SAFETY: the memory is ours and no reference to it exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), UnsafeCell::raw_get(self.0.as_ptr()), bytes.len()) };
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.read(0..self.len())
    }

    pub fn read(&self, range: Range<usize>) -> Vec<u8> {
        let cells = &self.0[range];
        let mut bytes = vec![0; cells.len()];
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(cells.as_ptr().cast(), bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }
}

pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

pub fn unhex(text: &str) -> Vec<u8> {
    let mut bytes = vec![0; text.len() / 2];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        for digit in pair {
            *byte = *byte << 4 | (*digit as char).to_digit(16).unwrap() as u8;
        }
    }
    bytes
}
