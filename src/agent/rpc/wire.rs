//! Requests that name pieces of the peer's regions, as bytes.

use crate::agent::core::limits::{CHUNK_BYTES, CHUNK_PIECES};
use crate::error::{Error, Result};

/// Part of a region: index, offset and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) region: u32,
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

impl Piece {
    /// Whether this one begins where `before` ends.
    pub(crate) fn follows(&self, before: &Piece) -> bool {
        self.region == before.region && before.offset.checked_add(before.len.into()) == Some(self.offset)
    }
}

/// Length of an encoded [`Piece`].
const PIECE_BYTES: usize = 16;

/// Pieces as they travel: their number, then each as region (32 bits), length (32 bits), offset (64 bits).
pub(crate) fn encode_pieces(pieces: &[Piece], extra: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(4 + pieces.len() * PIECE_BYTES + extra);
    bytes.extend_from_slice(&(pieces.len() as u32).to_le_bytes());
    for piece in pieces {
        bytes.extend_from_slice(&piece.region.to_le_bytes());
        bytes.extend_from_slice(&piece.len.to_le_bytes());
        bytes.extend_from_slice(&piece.offset.to_le_bytes());
    }
    bytes
}

/// The pieces and what follows them.
pub(crate) fn decode_pieces(bytes: &[u8]) -> Result<(Vec<Piece>, &[u8])> {
    let short = || Error::corrupt("a request that ends within its list of pieces");
    let (count, rest) = bytes.split_first_chunk::<4>().ok_or_else(short)?;
    let count = u32::from_le_bytes(*count) as usize;
    let (list, rest) = count.checked_mul(PIECE_BYTES).and_then(|len| rest.split_at_checked(len)).ok_or_else(short)?;
    let pieces = list
        .chunks_exact(PIECE_BYTES)
        .filter_map(|bytes| match *bytes {
            [r0, r1, r2, r3, l0, l1, l2, l3, o0, o1, o2, o3, o4, o5, o6, o7] => Some(Piece {
                region: u32::from_le_bytes([r0, r1, r2, r3]),
                len: u32::from_le_bytes([l0, l1, l2, l3]),
                offset: u64::from_le_bytes([o0, o1, o2, o3, o4, o5, o6, o7]),
            }),
            _ => None,
        })
        .collect();
    Ok((pieces, rest))
}

/// The pieces of a request to read or digest, within the bounds of one chunk.
pub(crate) fn read_request(data: &[u8]) -> Result<Vec<Piece>> {
    let (pieces, rest) = decode_pieces(data)?;
    if !rest.is_empty() {
        return Err(Error::corrupt(format!("{} bytes behind the list of pieces of a request", rest.len())));
    }
    check_chunk(pieces)
}

/// The pieces of a request to write, and their bytes.
pub(crate) fn write_request(data: &[u8]) -> Result<(Vec<Piece>, &[u8])> {
    let (pieces, bytes) = decode_pieces(data)?;
    if total(&pieces) != bytes.len() as u64 {
        return Err(Error::corrupt(format!("{} bytes arrived, expected {}", bytes.len(), total(&pieces))));
    }
    Ok((check_chunk(pieces)?, bytes))
}

fn check_chunk(pieces: Vec<Piece>) -> Result<Vec<Piece>> {
    let bytes = total(&pieces);
    if bytes > CHUNK_BYTES || pieces.len() > CHUNK_PIECES {
        return Err(Error::corrupt(format!(
            "a request of {} pieces and {bytes} bytes, at most {CHUNK_PIECES} and {CHUNK_BYTES} are allowed",
            pieces.len()
        )));
    }
    Ok(pieces)
}

pub(crate) fn total(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.len)).sum()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn piece_follows_only_its_neighbour() {
        let piece = |region, offset, len| Piece { region, offset, len };
        assert!(piece(1, 12, 3).follows(&piece(1, 4, 8)));
        for before in [piece(2, 4, 8), piece(1, 4, 7), piece(1, 12, 3), piece(1, u64::MAX, 13)] {
            assert!(!piece(1, 12, 3).follows(&before), "{before:?}");
        }
    }

    #[test]
    fn write_request_has_exactly_its_bytes() {
        let piece = Piece { region: 0, offset: 0, len: 4 };
        let request = |pieces: &[Piece], bytes: usize| {
            let mut data = encode_pieces(pieces, bytes);
            data.resize(data.len() + bytes, 7);
            data
        };
        assert_eq!(write_request(&request(&[piece; 2], 8)).unwrap(), (vec![piece; 2], &[7u8; 8][..]));
        let most = Piece { len: CHUNK_BYTES as u32, ..piece };
        for (pieces, bytes) in [
            (vec![piece], 3),
            (vec![piece], 5),
            (vec![], 1),
            (vec![most, piece], CHUNK_BYTES as usize + 4),
            (vec![Piece { len: 0, ..piece }; CHUNK_PIECES + 1], 0),
        ] {
            assert_eq!(write_request(&request(&pieces, bytes)).unwrap_err().kind(), ErrorKind::Corrupt);
        }
    }

    #[test]
    fn pieces_survive_the_wire() {
        let pieces = [
            Piece { region: 1, offset: u64::MAX, len: 3 },
            Piece { region: u32::MAX, offset: 7, len: u32::MAX },
            Piece { region: 0, offset: 0, len: 0 },
        ];
        let mut bytes = encode_pieces(&pieces, 2);
        let list = bytes.len();
        bytes.extend_from_slice(&[8, 9]);
        assert_eq!(decode_pieces(&bytes).unwrap(), (pieces.to_vec(), &[8u8, 9][..]));
        for cut in 0..list {
            assert_eq!(decode_pieces(&bytes[..cut]).unwrap_err().kind(), ErrorKind::Corrupt);
        }
        // A count that promises more than memory holds.
        assert!(decode_pieces(&[255; 64]).is_err());
        assert_eq!(total(&pieces), 3 + u64::from(u32::MAX));
    }
}
