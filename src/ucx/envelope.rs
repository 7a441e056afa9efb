//! The wrapping of worker addresses and packed rkeys when they leave the process.
//!
//! UCX trusts the bytes that it is given to connect or to unpack: damaged ones can crash it. So what is
//! exported carries a magic number, a version of its own (not UCX's), its kind, its length and a checksum,
//! and nothing reaches UCX before all of them were verified. The checksum finds damage, not malice.
//!
//! Layout, little endian: magic `KVFU`, version `u8`, kind `u8`, zero `u16`, payload length `u32`, payload,
//! FNV-1a (64 bit) of all before it.

use super::status::{Status, UcxError};

const MAGIC: [u8; 4] = *b"KVFU";
const VERSION: u8 = 1;
const HEADER: usize = 12;
const TRAILER: usize = 8;

/// The content of an envelope.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum EnvelopeKind {
    /// A UCX worker address.
    Address = 1,
    /// Base address, length, memory kind and a packed rkey.
    Rkey = 2,
}

impl EnvelopeKind {
    fn name(self) -> &'static str {
        match self {
            Self::Address => "a worker address",
            Self::Rkey => "an rkey",
        }
    }

    fn of(code: u8) -> Option<Self> {
        [Self::Address, Self::Rkey].into_iter().find(|kind| *kind as u8 == code)
    }
}

/// Wraps `payload`.
pub(super) fn seal(kind: EnvelopeKind, payload: &[u8]) -> Result<Vec<u8>, UcxError> {
    let length = u32::try_from(payload.len())
        .map_err(|_| UcxError::invalid("seal", format!("{} of {} bytes is too long", kind.name(), payload.len())))?;
    let mut bytes = Vec::with_capacity(HEADER + payload.len() + TRAILER);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&[VERSION, kind as u8, 0, 0]);
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes.extend_from_slice(&fnv1a(&bytes).to_le_bytes());
    Ok(bytes)
}

/// Verifies `bytes` and returns the payload.
pub(super) fn open(expected: EnvelopeKind, bytes: &[u8]) -> Result<&[u8], UcxError> {
    let refuse = |why: String| {
        let detail = format!("these {} bytes are not {} of kvferry's: {why}", bytes.len(), expected.name());
        UcxError::new("open envelope", Status::MALFORMED, detail)
    };
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else {
        return Err(refuse(format!("expected at least {} bytes", HEADER + TRAILER)));
    };
    let [m0, m1, m2, m3, version, kind, _, _, l0, l1, l2, l3] = *header;
    if [m0, m1, m2, m3] != MAGIC {
        return Err(refuse(format!("they start with {:02x?}, expected {MAGIC:02x?}", [m0, m1, m2, m3])));
    }
    if version != VERSION {
        return Err(refuse(format!(
            "their version is {version}, expected {VERSION}; run the same kvferry release on both sides"
        )));
    }
    let Some((payload, trailer)) = rest.split_last_chunk::<TRAILER>() else {
        return Err(refuse("they end before the checksum".to_owned()));
    };
    let length = u32::from_le_bytes([l0, l1, l2, l3]);
    if u64::from(length) != payload.len() as u64 {
        return Err(refuse(format!("they announce {length} bytes of contents and hold {}", payload.len())));
    }
    let (stated, computed) =
        (u64::from_le_bytes(*trailer), fnv1a(bytes.get(..HEADER + payload.len()).unwrap_or_default()));
    if stated != computed {
        return Err(refuse(format!("their checksum is {stated:016x}, computed {computed:016x}: they are damaged")));
    }
    match EnvelopeKind::of(kind) {
        Some(kind) if kind == expected => Ok(payload),
        Some(kind) => Err(refuse(format!("they are {}", kind.name()))),
        None => Err(refuse(format!("they are of the unknown kind {kind}"))),
    }
}

/// True if an exported worker address tells the longest segment that its owner takes. Those of UCX's version 1 do
/// not, and a UCX that connects to one believes that any length fits.
///
/// # Errors
/// [`Status::MALFORMED`] for bytes that are no exported address.
pub fn tells_segments(address: &[u8]) -> Result<bool, UcxError> {
    let address = open(EnvelopeKind::Address, address)?;
    // The lower half of the first byte is the version, from 0 for version 1 (ucp_address_pack in ucp/wireup/address.c).
    Ok(address.first().is_some_and(|first| first & 0x0f != 0))
}

/// FNV-1a with the 64-bit offset basis and prime of its specification (draft-eastlake-fnv).
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    #[test]
    fn fnv1a_matches_the_published_vectors() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn every_damaged_bit_and_every_cut_is_refused() {
        let sealed = seal(EnvelopeKind::Address, b"some address").unwrap();
        for bit in 0..sealed.len() * 8 {
            let mut damaged = sealed.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let error = open(EnvelopeKind::Address, &damaged).unwrap_err();
            assert_eq!(error.status, Status::MALFORMED, "bit {bit}");
        }
        for length in 0..sealed.len() {
            assert!(open(EnvelopeKind::Address, &sealed[..length]).is_err(), "cut to {length}");
        }
        let mut longer = sealed.clone();
        longer.push(0);
        assert!(open(EnvelopeKind::Address, &longer).is_err());
    }

    #[test]
    fn a_newer_version_says_what_to_do() {
        let mut sealed = seal(EnvelopeKind::Address, b"x").unwrap();
        sealed[4] = 2;
        let error = open(EnvelopeKind::Address, &sealed).unwrap_err();
        assert!(error.detail.contains("version is 2, expected 1"), "{error}");
    }
}
