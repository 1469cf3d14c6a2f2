//! Errors as Python exceptions with the same text.

use pyo3::PyErr;
use pyo3::exceptions::PyValueError;

pyo3::create_exception!(marlinspike, Error, PyValueError, "An input that marlinspike refuses.");

/// The exception.
pub(crate) fn raised(text: impl ToString) -> PyErr {
    Error::new_err(text.to_string())
}

/// Results whose error becomes the exception.
pub(crate) trait Failed<T> {
    fn failed(self) -> Result<T, PyErr>;
}

impl<T, E: std::error::Error> Failed<T> for Result<T, E> {
    fn failed(self) -> Result<T, PyErr> {
        self.map_err(raised)
    }
}
