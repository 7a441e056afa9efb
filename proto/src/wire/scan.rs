//! Walks msgpack without building anything, so that a decoder only ever sees input of bounded depth whose every length
//! fits the bytes that are there, with nothing behind it.

/// The bytes of one value's head, and what follows it.
enum ValueHead {
    /// This many bytes of content.
    Bytes(u64),
    /// This many further values, one level deeper.
    Values(u64),
}

/// Takes a big-endian number of `N` bytes.
fn number<const N: usize>(bytes: &mut &[u8]) -> Option<u64> {
    let (head, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(head.iter().fold(0, |n, &byte| n << 8 | u64::from(byte)))
}

/// Takes a value's head. None for the one marker that msgpack never uses and for a head that is cut off.
fn item(bytes: &mut &[u8]) -> Option<ValueHead> {
    let marker = number::<1>(bytes)?;
    Some(match marker {
        0x00..=0x7f | 0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => ValueHead::Bytes(0),
        0x80..=0x8f => ValueHead::Values((marker & 0x0f) * 2),
        0x90..=0x9f => ValueHead::Values(marker & 0x0f),
        0xa0..=0xbf => ValueHead::Bytes(marker & 0x1f),
        0xc4 | 0xd9 => ValueHead::Bytes(number::<1>(bytes)?),
        0xc5 | 0xda => ValueHead::Bytes(number::<2>(bytes)?),
        0xc6 | 0xdb => ValueHead::Bytes(number::<4>(bytes)?),
        // Extensions: a type byte before the content.
        0xc7 => ValueHead::Bytes(number::<1>(bytes)? + 1),
        0xc8 => ValueHead::Bytes(number::<2>(bytes)? + 1),
        0xc9 => ValueHead::Bytes(number::<4>(bytes)? + 1),
        0xd4..=0xd8 => ValueHead::Bytes((1 << (marker - 0xd4)) + 1),
        0xcc | 0xd0 => ValueHead::Bytes(1),
        0xcd | 0xd1 => ValueHead::Bytes(2),
        0xca | 0xce | 0xd2 => ValueHead::Bytes(4),
        0xcb | 0xcf | 0xd3 => ValueHead::Bytes(8),
        0xdc => ValueHead::Values(number::<2>(bytes)?),
        0xdd => ValueHead::Values(number::<4>(bytes)?),
        0xde => ValueHead::Values(number::<2>(bytes)? * 2),
        0xdf => ValueHead::Values(number::<4>(bytes)? * 2),
        _ => return None,
    })
}

/// Checks that `bytes` are exactly one msgpack value that nests at most `max_depth` arrays and maps. The error says
/// what is wrong and at which byte.
pub(super) fn scan(bytes: &[u8], max_depth: usize) -> Result<(), String> {
    let mut rest = bytes;
    // Values still to come, per open level.
    let mut open: Vec<u64> = vec![1];
    while let Some(left) = open.last_mut() {
        if *left == 0 {
            open.pop();
            continue;
        }
        *left -= 1;
        let at = bytes.len() - rest.len();
        let ended = || format!("it is cut off: a value at byte {at} runs past the end");
        match item(&mut rest) {
            None if rest.is_empty() => return Err(ended()),
            None => return Err(format!("byte {at} begins no value, or one that is cut off")),
            Some(ValueHead::Bytes(len)) => {
                rest = usize::try_from(len).ok().and_then(|len| rest.get(len..)).ok_or_else(ended)?;
            }
            // Every value takes at least a byte, so no count beyond the bytes can come true.
            Some(ValueHead::Values(count)) if count > rest.len() as u64 => return Err(ended()),
            Some(ValueHead::Values(count)) => {
                if open.len() > max_depth {
                    return Err(format!("it nests deeper than {max_depth} levels at byte {at}"));
                }
                open.push(count);
            }
        }
    }
    if rest.is_empty() { Ok(()) } else { Err(format!("{} bytes follow after its end", rest.len())) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    #[test]
    fn extensions_are_measured_with_their_type_byte() {
        let extension = |head: &[u8], content: usize| {
            let mut bytes = head.to_vec();
            bytes.resize(head.len() + 1 + content, 5);
            assert_eq!(scan(&bytes, 1), Ok(()), "{head:?}");
            assert!(scan(&bytes[..bytes.len() - 1], 1).is_err(), "{head:?} without its last byte");
            bytes.push(5);
            assert!(scan(&bytes, 1).is_err(), "{head:?} and a byte more");
        };
        (0..5).for_each(|power| extension(&[0xd4 + power], 1 << power));
        extension(&[0xc7, 3], 3);
        extension(&[0xc8, 1, 2], 0x102);
        extension(&[0xc9, 0, 1, 0, 2], 0x1_0002);
    }

    #[test]
    fn every_marker_is_measured_as_the_encoder_writes_it() {
        #[derive(serde::Serialize)]
        struct All {
            unit: (),
            flag: bool,
            ints: Vec<i64>,
            uints: Vec<u64>,
            floats: (f32, f64),
            texts: Vec<String>,
            bins: Vec<serde_bytes::ByteBuf>,
            long: Vec<u8>,
            map: std::collections::BTreeMap<u32, u32>,
        }
        let lengths = [0, 1, 31, 32, 255, 256, 65_535, 65_536];
        let all = All {
            unit: (),
            flag: true,
            ints: vec![-1, -32, -33, -128, -129, -32_768, -32_769, i64::from(i32::MIN), i64::MIN],
            uints: vec![0, 127, 128, 255, 256, 65_535, 65_536, u64::from(u32::MAX), u64::MAX],
            floats: (1.5, -2.5),
            texts: lengths.map(|n| "x".repeat(n)).to_vec(),
            bins: lengths.map(|n| serde_bytes::ByteBuf::from(vec![7; n])).to_vec(),
            long: vec![1; 70_000],
            map: (0..70_000).map(|n| (n, n)).collect(),
        };
        let bytes = rmp_serde::to_vec_named(&all).unwrap();
        assert_eq!(scan(&bytes, 8), Ok(()));
        assert!(scan(&bytes[..bytes.len() - 1], 8).unwrap_err().contains("cut off"));
        assert_eq!(scan(&[&bytes[..], &[0]].concat(), 8).unwrap_err(), "1 bytes follow after its end");
        // Extensions, which our encoder never writes.
        for (head, content) in [
            (&[0xd4u8][..], 2),
            (&[0xd5], 3),
            (&[0xd6], 5),
            (&[0xd7], 9),
            (&[0xd8], 17),
            (&[0xc7, 3], 4),
            (&[0xc8, 0, 3], 4),
        ] {
            let ext = [head, &vec![0; content]].concat();
            assert_eq!(scan(&ext, 8), Ok(()), "{head:x?}");
            assert!(scan(&ext[..ext.len() - 1], 8).is_err(), "{head:x?}");
        }
    }

    #[test]
    fn depth_is_bounded() {
        let nested = |n: usize| [vec![0x91; n], vec![0xc0]].concat();
        assert_eq!(scan(&nested(4), 4), Ok(()));
        assert_eq!(scan(&nested(5), 4).unwrap_err(), "it nests deeper than 4 levels at byte 4");
        assert!(scan(&vec![0x91; 10_000_000], 32).unwrap_err().contains("deeper"));
    }

    #[test]
    fn the_unused_marker_and_nothing_at_all_are_refused() {
        assert!(scan(&[0xc1, 0], 4).unwrap_err().contains("begins no value"));
        assert!(scan(&[], 4).unwrap_err().contains("cut off"));
    }
}
