//! Days of the calendar, in UTC: partitions are named after them.

use std::fmt;

pub const SECONDS: i64 = 86_400;

/// A day, counted from the first of 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Day(pub i64);

impl Day {
    /// The day that a moment belongs to.
    pub fn of_seconds(seconds: i64) -> Self {
        Day(seconds.div_euclid(SECONDS))
    }

    pub fn plus(self, days: i64) -> Self {
        Day(self.0 + days)
    }

    /// When it begins, in seconds since 1970.
    pub fn begin(self) -> i64 {
        self.0 * SECONDS
    }

    /// Year, month and day of the month: Howard Hinnant's `civil_from_days`.
    fn civil(self) -> (i64, i64, i64) {
        let shifted = self.0 + 719_468;
        let era = shifted.div_euclid(146_097);
        let of_era = shifted.rem_euclid(146_097);
        let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * of_year + 2) / 153;
        let day = of_year - (153 * from_march + 2) / 5 + 1;
        let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
        (year_of_era + era * 400 + i64::from(month <= 2), month, day)
    }

    /// `20250131`, as partitions are called.
    pub fn compact(self) -> String {
        let (year, month, day) = self.civil();
        format!("{year:04}{month:02}{day:02}")
    }
}

/// `2025-01-31`.
impl fmt::Display for Day {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = self.civil();
        write!(f, "{year:04}-{month:02}-{day:02}")
    }
}

/// A moment for people: `2025-01-31T12:34:56Z`.
pub fn moment(seconds: i64) -> String {
    let (day, of_day) = (Day::of_seconds(seconds), seconds.rem_euclid(SECONDS));
    format!("{day}T{:02}:{:02}:{:02}Z", of_day / 3600, of_day / 60 % 60, of_day % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_735_689_599, "2024-12-31"),
            (1_735_689_600, "2025-01-01"),
            (4_107_542_400, "2100-03-01"),
            (-1, "1969-12-31"),
        ] {
            assert_eq!(Day::of_seconds(seconds).to_string(), expected);
        }
        assert_eq!(Day::of_seconds(1_738_281_600).compact(), "20250131");
        assert_eq!(moment(1_738_281_600 + 45_296), "2025-01-31T12:34:56Z");
    }
}
