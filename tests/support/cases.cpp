// SPDX-License-Identifier: Apache-2.0
#include "support/cases.h"

#include <fstream>
#include <sstream>
#include <stdexcept>

#ifndef STEADYNORM_CASES
#define STEADYNORM_CASES "cases/cases.csv"
#endif

namespace steadynorm::test {

namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

Case parse(const std::string& line) {
  const std::vector<std::string> fields = split(line, ',');
  if (fields.size() != 4) throw std::runtime_error("expected 4 fields");
  Case result;
  result.name = fields[0];
  for (const std::string& size : split(fields[1], 'x')) result.shape.push_back(std::stoll(size));
  if (result.shape.size() < 2) throw std::runtime_error("expected a shape of rank 2 or more");
  Problem& p = result.problem;
  p.samples = result.shape[0];
  p.channels = result.shape[1];
  p.positions = 1;
  for (std::size_t d = 2; d < result.shape.size(); ++d) p.positions *= result.shape[d];
  p.groups = std::stoll(fields[2]);
  if (fields[3] != "contiguous" && fields[3] != "channels_last") throw std::runtime_error("unknown layout");
  p.layout = fields[3] == "contiguous" ? Layout::contiguous : Layout::channels_last;
  validate(p);
  return result;
}

}  // namespace

std::vector<Case> read_cases(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  if (!std::getline(in, line) || line != "name,shape,groups,layout")
    throw std::runtime_error(path + ": missing, or its first line is not name,shape,groups,layout");
  std::vector<Case> cases;
  while (std::getline(in, line)) {
    if (line.empty()) continue;
    try {
      cases.push_back(parse(line));
    } catch (const std::exception& error) {
      throw std::runtime_error(path + ": '" + line + "': " + error.what());
    }
  }
  return cases;
}

std::vector<Case> named_cases() { return read_cases(STEADYNORM_CASES); }

}  // namespace steadynorm::test
