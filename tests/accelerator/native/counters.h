// What tests count.
#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace late {

struct Tally {
  int64_t count = 0;
  int64_t bytes = 0;
};

struct Counters {
  std::map<std::string, int64_t> operators;         // every operator that was issued
  std::map<std::string, int64_t> synchronisations;  // by what made the host wait
  std::map<std::string, int64_t> streams;           // jobs that were issued there, other processes' part left out
  std::map<std::string, Tally> copies;              // what moves bytes without changing them
  std::map<std::string, Tally> collectives;         // bytes of the larger side

  void copied(const std::string& name, int64_t bytes) { add(copies[name], bytes); }
  void communicated(const std::string& name, int64_t bytes) { add(collectives[name], bytes); }

 private:
  static void add(Tally& tally, int64_t bytes) {
    tally.count++;
    tally.bytes += bytes;
  }
};

}  // namespace late
