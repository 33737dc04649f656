// Where a row of the table of metrics puts its values: the series of its family, of one run.
#pragma once

#include <concepts>
#include <cstddef>
#include <optional>
#include <span>
#include <string_view>

namespace ballast {

// A gauge takes a value, a counter grows by it, and a histogram observes it; a value that is not finite is left out.
// Called on the thread that reports.
class Samples {
 public:
  virtual ~Samples() = default;

  // To the one series.
  virtual void Add(double value) = 0;
  // To the series with this value of the label that lists its values; one that is not listed counts as the last.
  virtual void Add(std::string_view label_value, double value) = 0;
  // To the layer's series, by index into RunLabels::layers; of a layer that the run does not have, nothing.
  virtual void AddLayer(size_t layer, double value) = 0;
  // All to the one histogram, at once.
  virtual void AddAll(std::span<const double> values) = 0;
  // What a counter has come to since the run was added, in place of what it grew by; never falls.
  virtual void SetTotal(std::string_view label_value, double total) = 0;
  // Now, for timestamps.
  virtual double unix_s() const = 0;

  // None: nothing.
  void Add(const std::optional<double>& value) {
    if (value) Add(*value);
  }
  void AddLayer(size_t layer, const std::optional<double>& value) {
    if (value) AddLayer(layer, *value);
  }
  void AddNumber(const std::optional<double>& value) { Add(value); }
  template <class Number>
  requires std::integral<Number> || std::floating_point<Number>
  void AddNumber(Number value) { Add(static_cast<double>(value)); }
};

}  // namespace ballast
