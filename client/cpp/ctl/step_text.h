// How closed steps read: a line each, and as CSV.
#pragma once

#include <ostream>
#include <string>

#include "ballast/v1/admin.pb.h"

namespace ballast::ctl {

// "wait for rank 3"; what took most of the step's time.
std::string Slowest(const v1::StepRecord& step);
// What took how long of the step.
void PrintParts(const v1::StepRecord& step, std::ostream& out);

// A line of `watch`, and the line above all of them.
std::string WatchHead();
std::string WatchLine(const v1::StepRecord& step);

// A header and a row a step; what a step lacks is empty.
void PrintCsv(const v1::GetHistoryResponse& history, std::ostream& out);

}  // namespace ballast::ctl
