//! Choices from bytes: whatever the bytes, a valid choice, and zeros at their end.

/// Reads choices from bytes, from the front.
pub struct Source<'a>(&'a [u8]);

impl<'a> Source<'a> {
    /// Choices from `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Source(bytes)
    }

    /// Whether no byte is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A byte.
    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    /// A number less than `end`, which is at most 256.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end
    }

    /// Whether.
    pub fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// One time in `n`.
    pub fn rarely(&mut self, n: u8) -> bool {
        self.byte() % n == n - 1
    }

    /// A number of two bytes.
    pub fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// Small, medium, or anything at all.
    pub fn number(&mut self) -> u64 {
        match self.byte() {
            small @ 0..=199 => u64::from(small) % 20,
            200..=239 => u64::from(self.short()),
            240..=249 => u64::MAX - u64::from(self.byte()),
            _ => (0..8).fold(0, |sum, _| sum << 8 | u64::from(self.byte())),
        }
    }

    /// So many bytes, or what is left.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}
