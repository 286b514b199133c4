// What Python sees of the device (device.py).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "runtime.h"

namespace late {
void register_device();                      // guard.cpp
void prefer_kernels_of_cpu();                // fallback.cpp
void bind_group(pybind11::module_& m);       // group.cpp
void bind_laboratory(pybind11::module_& m);  // laboratory.cpp

namespace {

using Tallies = std::map<std::string, std::pair<int64_t, int64_t>>;

Tallies pairs(const std::map<std::string, Tally>& tallies) {
  Tallies found;
  for (const auto& [name, tally] : tallies) found[name] = {tally.count, tally.bytes};
  return found;
}

std::vector<std::string> descriptions(const std::vector<Race>& races) {
  std::vector<std::string> found;
  for (const Race& race : races) found.push_back(race.describe());
  return found;
}

}  // namespace
}  // namespace late

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace late;
  namespace py = pybind11;
  using NoGil = py::call_guard<py::gil_scoped_release>;

  register_device();
  prefer_kernels_of_cpu();

  py::enum_<Mode>(m, "Mode")
      .value("eager", Mode::Eager)
      .value("lazy", Mode::Lazy)
      .value("sides", Mode::Sides)
      .value("random", Mode::Random);
  m.def("device_count", &device_count);
  m.def("set_mode", [](Mode mode, uint64_t seed) { runtime().set_mode(mode, seed); }, NoGil());
  m.def("settle", [] { runtime().settle(); }, NoGil());
  m.def("stop", [] { runtime().stop(); }, NoGil());
  m.def("pending", [] { return runtime().pending(); }, NoGil());
  m.def("take_races", [] { return descriptions(runtime().take_races()); }, NoGil());
  m.def("reset_counters", [] { runtime().reset_counters(); });
  m.def("operators", [] { return runtime().counters().operators; });
  m.def("streams", [] { return runtime().counters().streams; });
  m.def("set_capturing", [](bool capturing) { runtime().set_capturing(current_stream(current_device()), capturing); });
  m.def("synchronisations", [] { return runtime().counters().synchronisations; });
  m.def("copies", [] { return pairs(runtime().counters().copies); });
  m.def("collectives", [] { return pairs(runtime().counters().collectives); });
  bind_group(m);
  bind_laboratory(m);
}
