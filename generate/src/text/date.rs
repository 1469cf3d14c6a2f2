//! The date that a chat template prints.

use std::fmt;
use std::str::FromStr;

use jiff::fmt::strtime;
use jiff::tz::Offset;
use jiff::{Timestamp, civil};

/// A day, which `strftime_now` of a chat template formats. Its time is midnight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Date(civil::Date);

impl Date {
    /// The current day of UTC.
    pub fn today() -> Self {
        Self(Offset::UTC.to_datetime(Timestamp::now()).date())
    }

    /// The day by a format of `strftime`.
    ///
    /// # Errors
    /// Names a conversion that is not supported.
    pub(super) fn strftime(self, format: &str) -> Result<String, String> {
        strtime::format(format, self.0.at(0, 0, 0, 0)).map_err(|e| format!("strftime_now: {e}"))
    }
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Date {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |e| format!("found {text:?}, expected a date such as 2026-03-05: {e}");
        text.parse().map(Self).map_err(wrong)
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
        for wrong in ["%", "%-", "%Q1", "%-Q"] {
            let error = date("2026-03-05").strftime(wrong).unwrap_err();
            assert!(error.starts_with("strftime_now: "), "{wrong}: {error}");
        }
    }

    #[test]
    fn other_texts_are_no_dates() {
        for text in ["", "2026", "2026-02-29", "2026-13-01", "2026-1-1", "2026-01-32", "today"] {
            let error = text.parse::<Date>().unwrap_err();
            assert!(error.contains("expected a date such as"), "{text}: {error}");
        }
    }
}
