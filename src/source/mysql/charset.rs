//! From the character sets of columns to UTF-8.
//!
//! The log names a collation by number, and every collation belongs to one character set. The numbers are those of
//! MySQL 9.7 and MariaDB 11.4, which agree where both have one: MariaDB's NOPAD collations are the older ones plus
//! 1024, and its UCA 14 collations begin at 2048 with 256 numbers for each Unicode encoding.

use encoding_rs::{DecoderResult, Encoding};

/// How the bytes of a string are to be read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Charset {
    Binary,
    /// utf8mb4, utf8mb3 and ascii: the bytes can stay as they are.
    Utf8,
    Utf32,
    /// ISO 8859-9; the encoding of that name on the web is another one.
    Latin5,
    Encoded(&'static Encoding),
}

/// Bytes that are no text in their character set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotText;

/// `None` for a collation that is unknown, or whose character set nothing here can read: dec8, cp850, cp852, hp8, swe7,
/// armscii8, keybcs2, macce, geostd8.
pub fn of_collation(collation: u16) -> Option<Charset> {
    use encoding_rs as e;
    let encoding = match collation {
        1025..=1270 => return of_collation(collation - 1024),
        2048..=2303 | 2304..=2559 => return Some(Charset::Utf8),
        2560..=2815 | 2816..=3071 => e::UTF_16BE,
        3072..=3327 => return Some(Charset::Utf32),
        63 => return Some(Charset::Binary),
        11 | 65 => return Some(Charset::Utf8),
        33 | 76 | 83 | 192..=223 | 576..=578 => return Some(Charset::Utf8),
        45 | 46 | 224..=247 | 255..=323 | 608..=610 => return Some(Charset::Utf8),
        // MySQL's latin1 is Windows-1252.
        5 | 8 | 15 | 31 | 47..=49 | 94 => e::WINDOWS_1252,
        1 | 84 => e::BIG5,
        2 | 9 | 21 | 27 | 77 => e::ISO_8859_2,
        7 | 74 => e::KOI8_R,
        12 | 91 | 97 | 98 => e::EUC_JP,
        13 | 88 | 95 | 96 => e::SHIFT_JIS,
        14 | 23 | 50..=52 => e::WINDOWS_1251,
        16 | 71 => e::ISO_8859_8,
        18 | 89 => e::WINDOWS_874,
        19 | 85 => e::EUC_KR,
        20 | 41 | 42 | 79 => e::ISO_8859_13,
        22 | 75 => e::KOI8_U,
        24 | 28 | 86 | 87 => e::GBK,
        25 | 70 => e::ISO_8859_7,
        26 | 34 | 44 | 66 | 99 => e::WINDOWS_1250,
        29 | 58 | 59 => e::WINDOWS_1257,
        30 | 78 => return Some(Charset::Latin5),
        35 | 90 | 128..=159 | 640..=642 => e::UTF_16BE,
        36 | 68 => e::IBM866,
        39 | 53 => e::MACINTOSH,
        54 | 55 | 101..=124 | 672..=674 => e::UTF_16BE,
        56 | 62 => e::UTF_16LE,
        57 | 67 => e::WINDOWS_1256,
        60 | 61 | 160..=183 | 736..=738 => return Some(Charset::Utf32),
        248..=250 => e::GB18030,
        _ => return None,
    };
    Some(Charset::Encoded(encoding))
}

/// Appends the text as UTF-8.
pub fn to_utf8(charset: Charset, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), NotText> {
    let mut push = |character: char| out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
    match charset {
        Charset::Binary | Charset::Utf8 => out.extend_from_slice(bytes),
        Charset::Utf32 => {
            let (characters, left) = bytes.as_chunks::<4>();
            for character in characters {
                push(char::from_u32(u32::from_be_bytes(*character)).ok_or(NotText)?);
            }
            if !left.is_empty() {
                return Err(NotText);
            }
        }
        Charset::Latin5 => {
            for &byte in bytes {
                push(match byte {
                    0xd0 => 'Ğ',
                    0xdd => 'İ',
                    0xde => 'Ş',
                    0xf0 => 'ğ',
                    0xfd => 'ı',
                    0xfe => 'ş',
                    latin1 => char::from(latin1),
                });
            }
        }
        Charset::Encoded(encoding) => {
            let mut decoder = encoding.new_decoder_without_bom_handling();
            let room = decoder.max_utf8_buffer_length_without_replacement(bytes.len()).ok_or(NotText)?;
            let start = out.len();
            out.resize(start + room, 0);
            let (result, _, written) = decoder.decode_to_utf8_without_replacement(bytes, &mut out[start..], true);
            out.truncate(start + written);
            if result != DecoderResult::InputEmpty {
                return Err(NotText);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(collation: u16, bytes: &[u8]) -> Option<String> {
        let mut out = Vec::new();
        to_utf8(of_collation(collation)?, bytes, &mut out).ok()?;
        String::from_utf8(out).ok()
    }

    #[test]
    fn text_of_every_family_becomes_utf8() {
        assert_eq!(text(8, b"gr\xfc\xdfe \x80").as_deref(), Some("grüße €"));
        assert_eq!(text(28, b"\xc4\xe3\xba\xc3").as_deref(), Some("你好"));
        assert_eq!(text(30, b"\xde\xfd").as_deref(), Some("Şı"));
        assert_eq!(text(54, b"\x00a\xd8\x3d\xde\x00").as_deref(), Some("a😀"));
        assert_eq!(text(62, b"a\x00").as_deref(), Some("a"));
        assert_eq!(text(60, b"\x00\x01\xf6\x00").as_deref(), Some("😀"));
        assert_eq!(text(1032, b"\xfc").as_deref(), Some("ü"));
        assert_eq!(text(2304, "ü".as_bytes()).as_deref(), Some("ü"));
        assert_eq!(text(60, b"\x00\x01\xf6"), None);
        assert_eq!(text(28, b"\xc4"), None);
        assert_eq!(text(4, b"a"), None);
        assert_eq!(text(9999, b"a"), None);
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics_and_stays_utf8(collation: u16, bytes: Vec<u8>) {
            let Some(charset) = of_collation(collation % 3400) else { return Ok(()) };
            let mut out = Vec::new();
            if to_utf8(charset, &bytes, &mut out).is_ok() && !matches!(charset, Charset::Binary | Charset::Utf8) {
                prop_assert!(std::str::from_utf8(&out).is_ok());
            }
        }
    }
}
