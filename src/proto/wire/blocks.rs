//! Block ids as a flat integer array, on the wire as little-endian 32-bit words in one binary field.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Block ids of one KV-cache group, cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Blocks(std::sync::Arc<[u32]>);

impl Blocks {
    /// The ids.
    pub fn ids(&self) -> &[u32] {
        &self.0
    }

    /// How many ids.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Vec<u32>> for Blocks {
    fn from(ids: Vec<u32>) -> Self {
        Blocks(ids.into())
    }
}

impl From<&[u32]> for Blocks {
    fn from(ids: &[u32]) -> Self {
        Blocks(ids.into())
    }
}

impl Serialize for Blocks {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let bytes: Vec<u8> = self.0.iter().flat_map(|id| id.to_le_bytes()).collect();
        s.serialize_bytes(&bytes)
    }
}

impl<'de> Deserialize<'de> for Blocks {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let bytes = serde_bytes::ByteBuf::deserialize(d)?;
        let (words, rest) = bytes.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(serde::de::Error::custom(format!(
                "a block list is a multiple of 4 bytes, this one has {}",
                bytes.len()
            )));
        }
        Ok(Blocks(words.iter().map(|w| u32::from_le_bytes(*w)).collect()))
    }
}
