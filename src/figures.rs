//! Figures as people read them.

/// `12 B`, `3.4 MiB`.
pub fn bytes(count: u64) -> String {
    let (unit, size) = match count {
        0..1024 => return format!("{count} B"),
        1024..1_048_576 => ("KiB", 1_u64 << 10),
        1_048_576..1_073_741_824 => ("MiB", 1 << 20),
        _ => ("GiB", 1 << 30),
    };
    format!("{:.1} {unit}", count as f64 / size as f64)
}

/// `1,234,567`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// `0.2 s`, `42 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`.
pub fn span(seconds: f64) -> String {
    let whole = seconds.max(0.0) as u64;
    let (days, hours, minutes, rest) = (whole / 86_400, whole / 3600 % 24, whole / 60 % 60, whole % 60);
    match (days, hours, minutes) {
        (0, 0, 0) if whole < 10 => format!("{:.1} s", seconds.max(0.0)),
        (0, 0, 0) => format!("{rest} s"),
        (0, 0, _) => format!("{minutes} min {rest} s"),
        (0, ..) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short_and_whole() {
        assert_eq!([bytes(0), bytes(2048), bytes(5 << 20), bytes(3 << 30)], ["0 B", "2.0 KiB", "5.0 MiB", "3.0 GiB"]);
        assert_eq!([count(0), count(999), count(1000), count(1_234_567)], ["0", "999", "1,000", "1,234,567"]);
        let spans = [0.25, 9.96, 42.0, 185.0, 7800.0, 273_600.0].map(span);
        assert_eq!(spans, ["0.2 s", "10.0 s", "42 s", "3 min 5 s", "2 h 10 min", "3 d 4 h"]);
    }
}
