//! The date that a chat template prints.

use std::fmt::Write as _;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// The weekdays from that of 1970-01-01 on.
const WEEKDAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// A day, which `strftime_now` of a chat template formats. Its time is midnight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Date {
    year: u64,
    /// 0 to 11.
    month: usize,
    /// 1 to 31.
    day: u64,
    /// Days since 1970-01-01.
    since_epoch: u64,
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_of(year: u64, month: usize) -> u64 {
    match month {
        1 => 28 + u64::from(is_leap(year)),
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

fn days_before(year: u64, month: usize) -> u64 {
    (0..month).map(|month| days_of(year, month)).sum()
}

impl Date {
    /// The current day of UTC.
    pub fn today() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::of_days((since.as_secs() / 86_400).min(2_932_896))
    }

    /// The day `since_epoch` days after 1970-01-01.
    fn of_days(since_epoch: u64) -> Self {
        let (mut year, mut left) = (1970, since_epoch);
        while left >= days_before(year, 12) {
            left -= days_before(year, 12);
            year += 1;
        }
        let months = (0..12).rev().find(|&month| days_before(year, month) <= left);
        let month = months.unwrap_or(0);
        Self { year, month, day: left - days_before(year, month) + 1, since_epoch }
    }

    /// The day by a format of `strftime`.
    ///
    /// # Errors
    /// Names a conversion that is not supported.
    pub(super) fn strftime(self, format: &str) -> Result<String, String> {
        let (mut out, mut rest) = (String::new(), format.chars());
        let weekday = WEEKDAYS[(self.since_epoch % 7) as usize];
        let month = self.month as u64 + 1;
        while let Some(c) = rest.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut code = rest.next();
            let is_padded = code != Some('-');
            if !is_padded {
                code = rest.next();
            }
            let mut number = |n: u64, width: usize| {
                let width = if is_padded { width } else { 0 };
                write!(out, "{n:0width$}").map_err(|e| e.to_string())
            };
            match code {
                Some('Y') => number(self.year, 4)?,
                Some('y') => number(self.year % 100, 2)?,
                Some('m') => number(month, 2)?,
                Some('d') => number(self.day, 2)?,
                Some('j') => number(days_before(self.year, self.month) + self.day, 3)?,
                Some('H' | 'M' | 'S') => number(0, 2)?,
                Some('I') => number(12, 2)?,
                Some('p') => out.push_str("AM"),
                Some('B') => out.push_str(MONTHS[self.month]),
                Some('b') => out.push_str(&MONTHS[self.month][..3]),
                Some('A') => out.push_str(weekday),
                Some('a') => out.push_str(&weekday[..3]),
                Some('F') => out.push_str(&self.strftime("%Y-%m-%d")?),
                Some('%') => out.push('%'),
                other => {
                    let found = other.map(String::from).unwrap_or_default();
                    return Err(format!(
                        "strftime_now: found %{found}, expected one of %Y %y %m %d %j %H %M %S %I %p %B %b \
                         %A %a %F %%"
                    ));
                }
            }
        }
        Ok(out)
    }
}

impl FromStr for Date {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("found {text:?}, expected a date from 1970-01-01 to 9999-12-31");
        let parts: Vec<&str> = text.split('-').collect();
        let [year, month, day] = parts[..] else { return Err(wrong()) };
        let number = |text: &str, len: usize| {
            let is_number = text.len() == len && text.bytes().all(|b| b.is_ascii_digit());
            if is_number { text.parse::<u64>().map_err(|_| wrong()) } else { Err(wrong()) }
        };
        let (year, month, day) = (number(year, 4)?, number(month, 2)?, number(day, 2)?);
        if year < 1970 || !(1..=12).contains(&month) {
            return Err(wrong());
        }
        let month = month as usize - 1;
        if !(1..=days_of(year, month)).contains(&day) {
            return Err(wrong());
        }
        let years: u64 = (1970..year).map(|year| days_before(year, 12)).sum();
        let since_epoch = years + days_before(year, month) + day - 1;
        Ok(Self { year, month, day, since_epoch })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn date(text: &str) -> Date {
        text.parse().unwrap()
    }

    #[test]
    fn formats_are_those_of_python() {
        let found =
            date("2026-03-05").strftime("%A %a %-d/%-m/%y, %d %B (%b) %Y %j %F %H:%M:%S %I %p %%");
        let expected = "Thursday Thu 5/3/26, 05 March (Mar) 2026 064 2026-03-05 00:00:00 12 AM %";
        assert_eq!(found.unwrap(), expected);
        assert_eq!(date("2000-02-29").strftime("%A").unwrap(), "Tuesday");
        assert_eq!(date("1970-01-01").strftime("%A").unwrap(), "Thursday");
        for wrong in ["%", "%-", "%Z", "%-Q"] {
            assert!(date("2026-03-05").strftime(wrong).unwrap_err().contains("expected one of"));
        }
    }

    #[test]
    fn days_and_dates_agree_around_leap_days() {
        // Two years around each turn of a rule: every day once, in order.
        for (first, days) in [("1970-01-01", 0), ("1999-01-01", 10_592), ("2099-01-01", 47_117)] {
            let (mut days, first) = (days, date(first).year);
            for year in first..first + 2 {
                for month in 1..=12 {
                    for day in 1..=days_of(year, month - 1) {
                        let text = format!("{year:04}-{month:02}-{day:02}");
                        assert_eq!(date(&text), Date::of_days(days), "{text}");
                        days += 1;
                    }
                }
            }
        }
        assert_eq!(Date::of_days(2_932_896), date("9999-12-31"));
        assert!(Date::today().since_epoch > 20_000);
    }

    #[test]
    fn other_texts_are_no_dates() {
        for text in [
            "",
            "2026",
            "2026-02-29",
            "1900-01-01",
            "2026-13-01",
            "2026-00-01",
            "2026-1-1",
            "2026-01-00",
            "2026-01-32",
            "+026-01-01",
            "2026-01-01-",
            "99999-01-01",
            "today",
        ] {
            assert!(text.parse::<Date>().unwrap_err().contains("1970-01-01 to"), "{text}");
        }
    }
}
